"""What a CommsLogger records of collectives between real ranks: counts, bytes, bandwidths, and nothing when it is off."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
from hybrid_cases import collectives
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hybrid.profiling.comms import CommsLogger
from hybrid.profiling.latencies import BUCKETS, TrafficTable
from hybrid.training.config.monitoring import COLLECTIVES, CommsLoggerConfig

ON = CommsLoggerConfig(enabled=True)


def counts(logger: CommsLogger) -> dict[str, dict[int | str, int]]:
    return {name: {size: row["count"] for size, row in sizes.items()} for name, sizes in logger.summary().items()}


def every_collective() -> dict:
    rank, ranks = dist.get_rank(), 2
    x, parts = torch.ones(6), [torch.ones(3), torch.ones(3)]
    empty = lambda: [torch.empty(6) for _ in range(ranks)]  # noqa: E731
    with CommsLogger(ON) as logger:
        dist.all_reduce(x)
        dist.all_gather(empty(), x)
        dist.all_gather_into_tensor(torch.empty(12), x)
        dist.reduce_scatter(torch.empty(3), parts)
        dist.reduce_scatter_tensor(torch.empty(3), x)
        dist.all_to_all(empty(), [x, x])
        dist.all_to_all_single(torch.empty(6), x)
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.gather(x, empty() if rank == 0 else None, 0)
        dist.scatter(x, [x.clone(), x.clone()] if rank == 0 else None, 0)
        dist.barrier()
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
    return logger.summary()


BYTES = {
    "all_reduce": 24, "all_gather": 48, "all_gather_into_tensor": 48, "reduce_scatter": 24, "reduce_scatter_tensor": 24,
    "all_to_all": 48, "all_to_all_single": 24, "broadcast": 24, "reduce": 24, "gather": 48, "scatter": 48, "barrier": 0,
}  # fmt: skip
BUS = {"broadcast": 1.0, "reduce": 1.0, "all_reduce": 1.0}  # of two ranks: 2 (n - 1) / n = 1; the others (n - 1) / n


def test_every_collective_is_recorded_with_the_bytes_and_bandwidths_of_nccl_tests(pool2):
    for rank, summary in enumerate(pool2.run(every_collective)):
        other = ["send", "recv"][rank]
        assert summary.pop(other)[24] | {"histogram": None} == {
            "count": 1, "bytes": 24, "total_bytes": 24, "timed": 0, "total_s": None, "mean_s": None, "min_s": None, "max_s": None,
            "algbw": None, "busbw": None, "histogram": None,
        }  # fmt: skip
        assert {name: list(sizes) for name, sizes in summary.items()} == {name: [size] for name, size in BYTES.items()}
        for name, size in BYTES.items():
            row = summary[name][size]
            assert (row["count"], row["timed"], row["bytes"]) == (1, 1, size)
            assert row["min_s"] == row["max_s"] == row["mean_s"] == row["total_s"] > 0
            assert row["algbw"] * row["mean_s"] == pytest.approx(size)
            assert row["busbw"] == pytest.approx(row["algbw"] * BUS.get(name, 0.5))
            assert sum(row["histogram"]) == 1
    assert {*BYTES, "send", "recv"} == set(COLLECTIVES)


def several() -> dict:
    logger = CommsLogger(ON)
    x = torch.ones(8)
    dist.all_reduce(x)
    logger.start()
    logger.start()
    for _ in range(5):
        dist.all_reduce(x)
    works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    logger.stop()
    logger.stop()
    before = logger.summary()
    for _ in range(4):
        dist.all_reduce(x)
    assert logger.summary() == before
    assert _get_current_dispatch_mode() is None
    logger.start()
    dist.all_reduce(x)
    logger.stop()
    row = before["all_reduce"][32]
    assert row["algbw"] * row["mean_s"] == pytest.approx(32)
    assert row["min_s"] <= row["mean_s"] <= row["max_s"]
    return {"before": before, "after": counts(logger)}


def test_n_collectives_are_n_records_and_after_stop_none(pool2):
    for result in pool2.run(several):
        assert {size: row["count"] for size, row in result["before"]["all_reduce"].items()} == {8: 3, 32: 5}
        assert result["after"] == {"all_reduce": {8: 3, 32: 6}}


def switched_off() -> list[dict]:
    found = []
    for config in (
        CommsLoggerConfig(),
        CommsLoggerConfig(enabled=False, prof_ops=("all_reduce",), verbose=True),
        CommsLoggerConfig(enabled=True, prof_ops=("broadcast", "barrier")),
    ):
        logger = CommsLogger(config)
        logger.start()
        assert (_get_current_dispatch_mode() is None) == (not config.enabled)
        dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(4), 0)
        logger.stop()
        found.append(counts(logger))
    return found


def test_enabled_false_records_nothing_and_prof_ops_filters_by_name(pool2):
    assert pool2.run(switched_off) == [[{}, {}, {"broadcast": {16: 1}}]] * 2


def overlapping() -> tuple[dict, dict]:
    first, second = CommsLogger(ON), CommsLogger(ON)
    first.start()
    dist.all_reduce(torch.ones(1))
    second.start()
    dist.all_reduce(torch.ones(2))
    first.stop()  # before the one that began after it
    dist.all_reduce(torch.ones(3))
    second.stop()
    dist.all_reduce(torch.ones(4))
    assert _get_current_dispatch_mode() is None
    return counts(first), counts(second)


def test_two_loggers_live_side_by_side(pool2):
    assert pool2.run(overlapping) == [({"all_reduce": {4: 1, 8: 1}}, {"all_reduce": {8: 1, 12: 1}})] * 2


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False))


def gradients(watched: AbstractContextManager) -> list[Tensor]:
    model = two_layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.arange(18.0).view(3, 6) * (dist.get_rank() + 1)
    with watched:
        model(x).square().mean().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def sharded_step() -> tuple[dict, dict, bool]:
    logger, profiled = CommsLogger(ON), collectives()
    with profiled as counted:
        plain = gradients(nullcontext())
    seen = gradients(logger)
    return counts(logger), dict(counted), all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))


def test_a_sharded_forward_and_backward_is_seen_and_left_as_it_is(pool2):
    """Layers of 192 and 128 bytes, each gathered for its forward and again for its backward, each gradient scattered once."""
    for found, counted, equal in pool2.run(sharded_step):
        assert found == {"all_gather_into_tensor": {192: 2, 128: 2}, "reduce_scatter_tensor": {192: 1, 128: 1}}
        assert counted == {"all_gather": 4, "reduce_scatter": 2}  # what torch's profiler sees of a step without the logger
        assert equal


def functional() -> dict:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0)
    with CommsLogger(ON) as logger:
        sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        assert torch.equal(sharded.full_tensor(), whole)
        assert (sharded * sharded).sum().full_tensor() == 140.0
        sharded.view(8).softmax(0)  # needs the whole: DTensor gathers within the operation
    return counts(logger)


def test_collectives_that_dtensor_makes_are_seen(pool2):
    assert pool2.run(functional) == [{"all_gather_into_tensor": {32: 2}, "all_reduce": {4: 1}}] * 2


def many_sizes() -> tuple[dict, int]:
    logger = CommsLogger(ON, max_keys=3)
    with logger:
        for size in range(1, 9):
            for _ in range(2):
                dist.all_reduce(torch.ones(size))
        dist.barrier()
    summary = logger.summary()
    other = summary["all_reduce"]["other"]
    assert other["total_bytes"] == 2 * 4 * (4 + 5 + 6 + 7 + 8)
    assert other["algbw"] * other["total_s"] == pytest.approx(other["total_bytes"])
    return counts(logger), len(logger.summary()["all_reduce"])


def test_sizes_above_the_bound_share_one_entry(pool2):
    expected = {"all_reduce": {4: 2, 8: 2, 12: 2, "other": 10}, "barrier": {"other": 1}}
    assert pool2.run(many_sizes) == [(expected, 4)] * 2


def test_memory_does_not_grow_with_the_number_of_records():
    table = TrafficTable(max_keys=4)
    for i in range(10_000):
        table.add(("all_reduce", "reduce")[i % 2], i, 1.0, i * 1e-6)
    entries = table.copy()
    assert len(entries) == 4 + 2
    assert sum(entry.count for entry in entries.values()) == 10_000
    assert {len(entry.histogram) for entry in entries.values()} == {BUCKETS}
    assert list(entries)[-1] == ("reduce", None)


@pytest.mark.parametrize(("microseconds", "bucket"), [(0.0, 0), (0.9, 0), (1.0, 1), (1.9, 1), (2.0, 2), (1000.0, 10), (1e13, 31)])
def test_latencies_fall_into_buckets_of_powers_of_two(microseconds, bucket):
    table = TrafficTable(max_keys=1)
    table.add("barrier", 0, 1.0, microseconds / 1e6)
    assert table.copy()["barrier", 0].histogram.index(1) == bucket


def told() -> tuple[str, str, list[str], dict, dict]:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Lines(), CommsLogger(CommsLoggerConfig(enabled=True, verbose=True, debug=True), dist.group.WORLD)
    log = logging.getLogger("hybrid.profiling.comms")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with logger:
            dist.all_reduce(torch.ones(2))
            before = logger.summary()
            texts = logger.log_summary(), logger.log_summary(show_straggler=True)
            after = logger.summary()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return *texts, lines, before, after


def test_a_summary_is_text_names_stragglers_and_changes_nothing(pool2):
    results = pool2.run(told)
    late = []
    for rank, (plain, compared, lines, before, after) in enumerate(results):
        assert before == after
        assert plain.split()[:4] == ["operation", "bytes", "count", "total"]
        row = plain.splitlines()[1].split()
        assert row[:3] == ["all_reduce", "8", "1"]
        assert float(row[3]) == pytest.approx(before["all_reduce"][8]["total_s"] * 1e3, abs=1e-3)
        assert compared.splitlines()[0].endswith("straggler ms")
        late.append(float(compared.splitlines()[1].split()[-1]))
        assert lines[0].startswith("all_reduce of 8 bytes over 2 ranks: ")
        assert "test_comms.py:" in lines[0]
        assert len(lines) == (3 if rank == 0 else 1)  # rank 0 also has both summaries
    totals = [result[3]["all_reduce"][8]["total_s"] * 1e3 for result in results]
    assert late == pytest.approx([total - min(totals) for total in totals], abs=1e-3)


def test_it_stops_on_the_thread_that_started_it():
    logger, errors = CommsLogger(ON), []

    def stop() -> None:
        try:
            logger.stop()
        except ValueError as error:
            errors.append(str(error))

    logger.start()
    thread = threading.Thread(target=stop)
    thread.start()
    thread.join()
    logger.stop()
    assert len(errors) == 1
    assert "another thread" in errors[0]
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prof_ops": ["allreduce"]}, "nearest: all_reduce"),
        ({"prof_ops": ["xyz"]}, "allowed: all_reduce, all_gather"),
        ({"enabled": True, "prof_ops": ["broadcast"], "prof_all": True}, "allowed: one of them"),
        ({"enabled": True, "prof_all": False}, "records nothing"),
        ({"enable": True}, "enable"),
        ({"enabled": "true"}, "enabled"),
    ],
)
def test_mistakes_are_met_at_the_door(given, message):
    with pytest.raises(ValueError, match=message):
        CommsLoggerConfig(**given)
    with pytest.raises(ValueError, match="max_keys=0"):
        CommsLogger(ON, max_keys=0)


def test_the_sections_defaults_are_deepspeeds():
    expected = {"enabled": False, "prof_all": True, "prof_ops": (), "verbose": False, "debug": False}
    assert CommsLoggerConfig().model_dump() == expected
    assert not CommsLoggerConfig().records("all_reduce")
