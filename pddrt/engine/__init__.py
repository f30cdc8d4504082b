"""Engines: what runs one batch and holds the KV. `base` is the seam, `torch` the real one.

Idle OpenMP threads must not spin: several instances share the cores. The OpenMP runtime looks at
its settings once, when torch is first loaded, so they are made here, before any engine module can
load it. What the user has set stays.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("KMP_BLOCKTIME", "0")
