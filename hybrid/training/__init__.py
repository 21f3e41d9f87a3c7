"""Training as DeepSpeed's users know it, on our own engine.

Rooms:
    config/     the sections of a DeepSpeed configuration (no torch)
"""
