"""EnergyLens predicts the joules and seconds of LLM inference before anything is deployed.

The command line is `energylens`; as a library, start at `energylens.predict`. Importing this
package imports none of the heavy libraries.
"""

import logging

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())
