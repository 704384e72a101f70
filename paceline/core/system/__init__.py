"""What the operating system has and allows: cores, GPUs, descriptors, ports, files."""
