"""Importing the packages leaves the GPU alone, so that what forks afterwards (a data loader, a test runner) can still use it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Before anything is imported: who asks for a context, or for the number of devices, which readies the driver as well and is
# enough to keep a forked child from it.
COUNT = """
import torch
asked = []
def counted(owner, name):
    plain = getattr(owner, name)
    def ask(*args, **kwargs):
        asked.append(name)
        return plain(*args, **kwargs)
    setattr(owner, name, ask)
counted(torch.cuda, "_lazy_init")
for name in ("is_available", "device_count"):
    counted(torch.cuda, name)
"""
IMPORT_ALL = """
import importlib, pkgutil
imported = []
for package in ("inference_v2", "hybrid", "trainers", "recipes"):
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        try:
            importlib.import_module(info.name)
        except ModuleNotFoundError as error:  # of a package that is an extra
            assert error.name in ("triton", "trl"), error
        else:
            imported.append(info.name)
"""
FORK = """
import os, sys
child = os.fork()
if child == 0:
    status = 1
    try:
        assert torch.ones(3).sum().item() == 3
        if torch.cuda.is_available():
            assert torch.ones(3, device="cuda").sum().item() == 3
        status = 0
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
INITIALIZE = """
import hybrid
hybrid.init_distributed("gloo")
sgd = {"type": "SGD", "params": {"lr": 0.1}}
config = {"train_batch_size": 1, "device": "cpu", "optimizer": sgd}
engine, *_ = hybrid.initialize(model=torch.nn.Linear(2, 2), config=config)
engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()
assert engine.global_steps == 1
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_module_asks_for_cuda_and_a_forked_child_can_use_torch():
    untouched = "assert not torch.cuda.is_initialized() and not asked, asked\n"
    wanted = ("hybrid.comm", "hybrid.training.start", "hybrid.engine", "inference_v2.engine", "trainers.loop", "recipes.cli")
    run(COUNT + IMPORT_ALL + f"assert {set(wanted)} <= set(imported)\n" + untouched + FORK)


def test_a_step_on_the_cpu_makes_no_context():
    run(COUNT + INITIALIZE + 'assert not torch.cuda.is_initialized() and "_lazy_init" not in asked, asked\n')


def test_the_package_alone_imports_no_torch():
    run("import sys, hybrid, inference_v2, trainers, recipes\nassert 'torch' not in sys.modules")
