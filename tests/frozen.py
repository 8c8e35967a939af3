"""Takes all objects that exist when it is imported out of garbage collection.

Forks of a process that has imported much would otherwise visit, and by that copy, all of it again and again.
"""

import gc

gc.collect()
gc.freeze()
gc.enable()
