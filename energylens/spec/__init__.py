"""Models, devices, clusters and engines: YAML in, frozen values out."""
