"""Ground truth: real models run under a meter, and what their kernel traces say."""
