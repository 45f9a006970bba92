"""A stand-in accelerator for tests: a device of torch in host memory that behaves as accelerators do. See device.py."""
