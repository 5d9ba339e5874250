"""What holds for all tests."""

from hypothesis import settings

# A busy machine makes any example slow; a test that hangs is ended by its job's limit.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
