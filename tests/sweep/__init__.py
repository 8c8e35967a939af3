"""Every key, option, argument and file of the commands with what few of them can be, and what comes of each case.

    python -m tests.sweep [SUITE ...] [--every N] [--show KIND ...]

prints a table: for each suite its cases, and how many were refused clearly, accepted, refused vaguely, or ended in a
traceback, a hang or nonsense.
"""
