"""What the forkserver of local_world.py loads first.

It collects no garbage: modules stay. Its processes would copy each page that a collection touches.
"""

import gc

gc.disable()

import torch._dynamo  # noqa: E402, F401  # which all that train need
