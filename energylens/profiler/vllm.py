"""Engine ``vllm``: the real engine with its own defaults, stepped in this process."""
