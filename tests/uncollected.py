"""Imports what comes after it without garbage collection, until `tests.frozen`."""

import gc

gc.disable()
