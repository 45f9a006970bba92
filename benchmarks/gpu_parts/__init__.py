"""The parts of `gpu_session.py`: programs that print lines of JSON, and what they share."""
