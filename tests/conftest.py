"""What all tests share."""

import os

from hypothesis import settings

# Before torch is imported anywhere: test machines are small and shared, and a step's result must not depend on them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# On a loaded machine a single example may take long; pytest's timeout bounds the whole test.
settings.register_profile("regrow", deadline=None)
settings.load_profile("regrow")
