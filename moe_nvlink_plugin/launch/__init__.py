"""What a kernel is (kernel.py), and how one is started: on CPU threads or on a CUDA stream."""
