"""Results as JSON documents for programs (DESIGN section 5) and as tables for people.

Each verb imports the module of its own results: a prediction need not wait for the others.
"""
