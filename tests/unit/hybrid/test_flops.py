"""Operations against closed forms: layers, attention, whole models, forward and backward; and nothing is left behind."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hybrid_cases import cross_entropy, make_engine, pack
from tiny import save_tiny, tiny_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from hybrid.profiling.flops import FlopsProfiler, get_model_profile
from hybrid.profiling.table import number_text, profile_text
from hybrid.training.config.monitoring import FlopsProfilerConfig
from inference_v2 import SamplingParams
from inference_v2.kernels.cpu import BuildError, load_kernels
from inference_v2.kernels.flops import listen, unlisten


def profile(model: nn.Module, *args: object, **kwargs: object) -> tuple[int, int, int]:
    return get_model_profile(model, args=args, print_profile=False, as_string=False, **kwargs)


class Attention(nn.Module):
    """Projects nothing: only the attention itself."""

    def __init__(self, q_heads: int, kv_heads: int) -> None:
        super().__init__()
        self.q_heads, self.kv_heads = q_heads, kv_heads

    def forward(self, x: Tensor) -> Tensor:  # [B, T, (Hq + 2 Hk) * D]
        sizes = [self.q_heads, self.kv_heads, self.kv_heads]
        q, k, v = x.unflatten(-1, (sum(sizes), -1)).transpose(1, 2).split(sizes, dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def lenet() -> nn.Module:
    """The classical one: 61,706 parameters, images of 1 x 32 x 32."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(16, 120, 5),
        nn.Tanh(), nn.Flatten(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10), nn.Softmax(dim=1),
    )  # fmt: skip


def test_lenet_has_the_published_numbers():
    flops, macs, params = get_model_profile(lenet(), (1024, 1, 32, 32), print_profile=False, as_string=False)
    assert params == 61_706
    assert macs == 426_516_480
    assert flops == 2 * macs
    assert flops == pytest.approx(866_076_672, rel=0.05)


def test_a_linear_layer_is_twice_its_products():
    assert profile(nn.Linear(10, 10), torch.zeros(1, 10)) == (200, 100, 110)
    assert profile(nn.Linear(7, 5), torch.zeros(3, 4, 7))[0] == 2 * 12 * 7 * 5
    assert profile(nn.Linear(7, 5, bias=False), torch.zeros(7))[0] == 2 * 7 * 5  # one vector: aten.mv


class Called(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *x: Tensor) -> Tensor:
        return self.function(*x)


@pytest.mark.parametrize(
    ("function", "shapes", "macs"),
    [
        (torch.mv, [(3, 4), (4,)], 12),
        (torch.dot, [(4,), (4,)], 4),
        (torch.addmv, [(3,), (3, 4), (4,)], 12),
        (lambda own, a, b: own.addmv_(a, b), [(3,), (3, 4), (4,)], 12),
        (lambda own, a, b: own.addmm_(a, b), [(3, 5), (3, 4), (4, 5)], 60),
        (lambda own, a, b: own.baddbmm_(a, b), [(2, 3, 5), (2, 3, 4), (2, 4, 5)], 120),
        (torch.addbmm, [(3, 5), (2, 3, 4), (2, 4, 5)], 120),
        (lambda own, a, b: own.addbmm_(a, b), [(3, 5), (2, 3, 4), (2, 4, 5)], 120),
    ],
)
def test_products_by_other_names_count_too(function, shapes, macs):
    assert profile(Called(function), *(torch.ones(shape) for shape in shapes))[1] == macs


def test_a_training_step_of_deepspeeds_simple_model():
    model = nn.Linear(10, 10)
    with FlopsProfiler(model) as profiler:
        F.cross_entropy(model(torch.ones(1, 10)), torch.zeros(1, dtype=torch.long)).backward()
    report = profiler.report()
    assert (report["params"], report["forward_flops"], report["backward_flops"]) == (110, 200, 200)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_is_two_products_of_every_query_head(q_heads, kv_heads):
    x = torch.randn(3, 9, (q_heads + 2 * kv_heads) * 16, requires_grad=True)
    attention = Attention(q_heads, kv_heads)
    rectangle = 3 * q_heads * 9 * 9 * 16
    assert profile(attention, x)[1] == 2 * rectangle
    with FlopsProfiler(attention) as profiler:
        attention(x).sum().backward()
    assert profiler.report()["forward_flops"] == 4 * rectangle
    assert profiler.report()["backward_flops"] == 10 * rectangle  # scores again, and four gradients


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_grouped_convolutions_backward_is_twice_its_forward(kind, groups):
    conv = kind(8, 12, 3, groups=groups)
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    with FlopsProfiler(conv) as profiler:
        conv(x).sum().backward()
    places = 6 * 6 if kind is nn.ConvTranspose2d else 4 * 4
    report = profiler.report()
    assert report["forward_flops"] == 2 * 2 * places * 8 * 12 // groups * 9
    assert report["backward_flops"] == 2 * report["forward_flops"]


def test_backward_is_counted_as_it_runs_and_by_module():
    """The input of the first layer needs no gradient: three products in all, not four."""
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
    with FlopsProfiler(model) as profiler:
        model(torch.ones(5, 6)).sum().backward()
        torch.ones(4, 4) @ torch.ones(4, 4)  # outside the module
    report = profiler.report()
    first, last = report["children"]["0"], report["children"]["2"]
    assert (first["forward_flops"], first["backward_flops"]) == (2 * 5 * 6 * 8, 2 * 5 * 6 * 8)
    assert (last["forward_flops"], last["backward_flops"]) == (2 * 5 * 8 * 3, 4 * 5 * 8 * 3)
    assert report["flops"] == profiler.get_total_flops() == first["flops"] + last["flops"]
    assert [report[key] for key in ("class", "params", "macs")] == ["Sequential", 72, report["flops"] // 2]
    assert report["latency_s"] == profiler.get_total_duration() > first["latency_s"] > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_recomputed_is_counted_again(use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    model = Checkpointed()
    with FlopsProfiler(model) as profiler:
        model(torch.ones(3, 4, requires_grad=True)).sum().backward()
    one = 2 * 3 * 4 * 4
    inner = profiler.report()["children"]["inner"]
    assert (inner["forward_flops"], inner["backward_flops"]) == (2 * one, 6 * one)
    assert [inner["children"][i]["backward_flops"] for i in "02"] == [3 * one, 3 * one]


def llama_macs(model: nn.Module, rows: int, length: int) -> tuple[int, int, int]:
    """(decoder's matrices, head, attention) of a forward over rows x length tokens."""
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "layers" in name)
    config = model.config
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * rows * length**2
    return matrices * rows * length, config.vocab_size * config.hidden_size * rows * length, attention


@pytest.mark.parametrize("how", ["input_ids", "input_shape"])
def test_a_llama_is_its_closed_form(how):
    model = tiny_model("llama")
    if how == "input_ids":
        flops, macs, params = profile(model, kwargs={"input_ids": torch.ones(2, 11, dtype=torch.long)})
    else:
        flops, macs, params = get_model_profile(model, (2, 11), print_profile=False, as_string=False)
    assert macs == sum(llama_macs(model, 2, 11))
    assert flops == 2 * macs
    assert params == sum(p.numel() for p in model.parameters())


def test_generate_counts_every_forward_of_it():
    model = tiny_model("llama", eos_token_id=None)
    ids = torch.ones(1, 5, dtype=torch.long)
    macs = profile(model, ids, mode="generate", kwargs={"max_new_tokens": 3, "do_sample": False})[1]
    first, second, third = (llama_macs(model, 1, n) for n in (5, 1, 1))
    a_key = first[2] // 25  # attention of one query to one key
    heads = first[1] // 5  # of one position: generate asks for the last one's logits
    assert macs == first[0] + second[0] + third[0] + 3 * heads + a_key * (25 + 6 + 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    try:
        load_kernels()
    except BuildError as error:
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("llama")
    save_tiny(path, "llama")
    return str(path)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("fused", "attention"), [(False, "sdpa"), (True, "sdpa"), (False, "packed"), (True, "packed")])
def test_a_training_step_counts_alike_with_the_projects_kernels(folder, fused, attention, dtype, checkpointing):
    settings = {"fused_layers": fused, "attn_implementation": attention, "compute_dtype": dtype}
    engine = make_engine(folder, activation_checkpointing=checkpointing, **settings)
    batch = pack([list(range(3, 15))] * 3)
    engine.forward_backward([batch], cross_entropy)  # the first asks what the CPU can, by a product
    with FlopsProfiler(engine.model.module) as profiler:
        engine.forward_backward([batch], cross_entropy)
    matrices, _, attention_macs = llama_macs(tiny_model("llama"), 3, 12)
    head = 33 * 64 * engine.model.module.gathered_head().vocab_size  # of the 33 tokens that are counted
    report = profiler.report()
    # Recomputation stops at the last tensor to save: torch's own product saves its input before it runs, the project's after
    last = 0 if fused else 36 * 4 * 64 * 96
    again = matrices + attention_macs - last if checkpointing else 0
    node = report["children"]["hf"]["children"]["model"]
    assert node["forward_flops"] == 2 * (matrices + attention_macs)
    assert node["backward_flops"] == 4 * matrices + 5 * attention_macs + 2 * again
    assert report["children"]["hf"]["children"]["lm_head"]["flops"] == 3 * 2 * head
    assert report["flops"] == node["flops"] + 3 * 2 * head


def rollout_flops(engine: object) -> int:
    """What the C++ kernels tell of two rollouts."""
    told: list[tuple[str, int]] = []
    listener = lambda *heard: told.append(heard)  # noqa: E731
    listen(listener)
    try:
        engine.generate([[3, 4, 5, 6, 7]] * 2, SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True))
    finally:
        unlisten(listener)
    return sum(flops for _, flops in told)


def test_a_rollouts_kernels_tell_what_they_multiply(folder):
    engine = make_engine(folder)
    matrices = llama_macs(tiny_model("llama"), 2, 1)[0]
    keys = 25 + 6 + 7  # of 5 tokens, then of one each
    attention = 2 * 2 * 4 * 4 * 16 * keys
    assert rollout_flops(engine) == 2 * (matrices * (5 + 1 + 1) + attention)  # the fp32 head is torch's


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.broken = nn.Linear(4, 4), nn.Dropout(0.5), False

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            raise RuntimeError("on purpose")
        return self.dropout(self.linear(x)) + torch.rand(())


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_always_called")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@pytest.mark.parametrize("broken", [False, True])
def test_flags_hooks_and_random_state_come_back_also_after_an_exception(broken):
    model = Branches()
    model.train()
    model.linear.eval()
    flags, state, functional = [m.training for m in model.modules()], torch.get_rng_state(), F.linear
    model.broken = broken
    if broken:
        with pytest.raises(RuntimeError, match="on purpose"):
            get_model_profile(model, (2, 4), print_profile=False, warm_up=0)
    else:
        get_model_profile(model, (2, 4), print_profile=False)
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert hooks_of(model) == 0
    assert F.linear is functional
    assert _get_current_dispatch_mode() is None


def test_two_profilers_overlap_and_each_counts_its_own():
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(5, 5, bias=False)
    one, other = FlopsProfiler(first), FlopsProfiler(second)
    one.start_profile()
    other.start_profile()
    first(torch.ones(1, 3))
    second(torch.ones(1, 5))
    one.stop_profile()  # before the one that began after it
    first(torch.ones(1, 3))
    second(torch.ones(1, 5))
    other.stop_profile()
    assert (one.get_total_flops(), other.get_total_flops()) == (18, 100)
    assert _get_current_dispatch_mode() is None


def test_a_profile_starts_from_zero_and_ends_empty():
    model = nn.Linear(3, 3, bias=False)
    profiler = FlopsProfiler(model)
    for _ in range(2):
        profiler.start_profile()
        model(torch.ones(1, 3))
        with pytest.raises(ValueError, match="call stop_profile"):
            profiler.start_profile()
        profiler.stop_profile()
        profiler.stop_profile()
        assert profiler.get_total_flops() == 18
    profiler.end_profile()
    assert profiler.get_total_flops() == profiler.get_total_duration() == 0


def test_ignored_classes_are_left_out_with_all_below_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)))

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model[1](self.model[0](x))

    whole = get_model_profile(Kept(), (1, 4), print_profile=False, as_string=False)
    cut = get_model_profile(Kept(), (1, 4), print_profile=False, as_string=False, ignore_modules=[nn.Linear])
    assert (whole[0], cut[0]) == (2 * (16 + 8 + 4), 0)
    assert get_model_profile(model, (1, 4), print_profile=False, as_string=False, ignore_modules=[Kept])[0] == whole[0]


def test_the_text_is_printed_or_written_and_strings_are_short(tmp_path, capsys):
    path = tmp_path / "profile.txt"
    result = get_model_profile(lenet(), (1024, 1, 32, 32), top_modules=2, output_file=path)
    assert result == ("853.03 M", "426.52 MMACs", "61.71 k")
    assert capsys.readouterr().out == ""
    text = path.read_text()
    assert "  parameters: 61.71 k\n  MACs: 426.52 MMACs\n  operations: 853.03 MFLOPs\n    forward: 853.03 MFLOPs\n" in text
    assert "    backward: 0.00 FLOPs\n" in text
    assert "MACs: Conv2d 415.33 MMACs, Linear 11.18 MMACs" in text
    assert "(6): Conv2d 48.12 k, 78.0 %; 49.15 MMACs, 11.5 %" in text
    get_model_profile(nn.Linear(2, 2), (1, 2), detailed=False, module_depth=0)
    shown = capsys.readouterr().out
    assert "depth 0" in shown
    assert "Modules (" not in shown


@pytest.mark.parametrize(("number", "text"), [(0, "0.00"), (1.5, "1.50"), (999, "999.00"), (2.5e15, "2.50 P"), (2e-9, "0.00 u")])
def test_numbers_are_shown_with_the_prefix_of_a_thousand(number, text):
    assert number_text(number) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give input_shape, args or kwargs"),
        ({"input_shape": (1, 2), "mode": "train"}, "allowed: forward, generate"),
        ({"input_shape": (1, 2), "mode": "generate"}, "Linear, which has no generate"),
        ({"input_shape": (1, 2), "warm_up": -1}, "warm_up=-1"),
        ({"input_shape": (1, 2), "module_depth": -2}, "module_depth=-2"),
    ],
)
def test_mistakes_are_met_at_the_door(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_model_profile(nn.Linear(2, 2), **arguments)


def test_a_model_of_fake_tensors_is_counted_too():
    with FakeTensorMode():
        assert profile(nn.Linear(7, 5), torch.zeros(3, 7))[0] == 2 * 3 * 7 * 5


def sharded_flops(path: str) -> tuple[dict, int]:
    engine = make_engine(path, zero_stage=3)
    batch = pack([list(range(3, 8 + 2 * engine.rank))] * 2)
    with FlopsProfiler(engine.model.module) as profiler:
        engine.forward_backward([batch], cross_entropy)
    linear = nn.Linear(8, 6, bias=False)
    mesh = init_device_mesh("cpu", (2,))
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))
    with FlopsProfiler(linear) as by_rows:
        linear(distribute_tensor(torch.ones(4, 8), mesh, [Replicate()]))
    return profiler.report(), by_rows.get_total_flops()


def test_of_a_sharded_model_the_operations_are_this_ranks_and_the_parameters_whole(pool2, folder):
    model = tiny_model("llama")
    for rank, (report, of_rows) in enumerate(pool2.run(sharded_flops, folder)):
        matrices, _, attention = llama_macs(model, 2, 5 + 2 * rank)
        node = report["children"]["hf"]["children"]["model"]
        assert node["forward_flops"] == 2 * (matrices + attention)
        assert report["params"] == sum(p.numel() for p in model.parameters())
        assert of_rows == 2 * 4 * 8 * 3  # half of the weight's rows


def data_parallel_sizes() -> tuple[object, str]:
    profiler = FlopsProfiler(nn.Linear(2, 2))
    text = profile_text(profiler.report(), step=3, module_depth=-1, top_modules=1, detailed=False)
    return profiler.report()["data_parallel_size"], re.findall(r"data parallel size: (\d+)", text)[0]


def test_the_data_parallel_size_is_that_of_the_group_where_no_mesh_is_known(pool2, capsys):
    assert pool2.run(data_parallel_sizes) == [(2, "2")] * 2
    FlopsProfiler(nn.Linear(2, 2), data_parallel_size=4).print_model_profile()
    assert re.findall(r"data parallel size: (\d+)", capsys.readouterr().out) == ["4"]
    assert FlopsProfiler(nn.Linear(2, 2)).report()["data_parallel_size"] == 1


def test_the_sections_defaults_are_deepspeeds():
    assert FlopsProfilerConfig().model_dump() == {
        "enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True, "output_file": None,
        "recompute_fwd_factor": 0.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match="profile_step"):
        FlopsProfilerConfig(profile_step=0)
