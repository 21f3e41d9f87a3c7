"""Every benchmark on tiny models: that it counts what it says, and what it refuses. Nothing here depends on how long anything
takes."""

import importlib.util
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rl_cases import models, policy_settings
from tiny import character_tokenizer, save_tiny
from transformers import LlamaConfig

from inference_v2 import SamplingParams
from inference_v2.head import Head
from recipes.bench import engines, floor, machine, measure, peer_job, peers, phases, prompts
from recipes.cli import main

COMMON = {"command", "dtype", "tokens", "peak_memory_bytes", "machine", "versions"}
SPREAD = {"median", "min", "max", "runs"}
MACHINE = {"cpu", "cores", "threads", "isa", "omp_wait_policy", "load_average", "read_gb_per_s"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "llama", vocab_size=len(character_tokenizer()), max_position_embeddings=1024)
    return folder


@pytest.fixture(autouse=True)
def _little_memory_is_streamed(monkeypatch):
    monkeypatch.setattr(machine, "STREAM_BYTES", 2**20)


def bench(capsys, *argv) -> dict:
    threads = torch.get_num_threads()
    assert main(["bench", *map(str, argv), "--json"]) == 0
    assert torch.get_num_threads() == threads
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report.keys() >= COMMON
    assert report["machine"].keys() == MACHINE
    assert report["machine"]["read_gb_per_s"] > 0
    assert {"python", "torch", "transformers", "hybrid-rlhf"} == report["versions"].keys()
    assert report["peak_memory_bytes"] > 10 * 2**20
    return report


def refused(capsys, *argv) -> str:
    """The one line that a command refuses with."""
    try:
        code = main(["bench", *map(str, argv)])
    except SystemExit as left:
        code = left.code
    assert code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hybrid: error: ")]
    assert len(lines) == 1
    return lines[0]


def check_spread(spread: dict, repeats: int) -> None:
    assert spread.keys() == SPREAD
    assert len(spread["runs"]) == repeats
    assert spread["min"] == min(spread["runs"]) <= spread["median"] <= max(spread["runs"]) == spread["max"]
    assert spread["min"] > 0


@pytest.fixture
def peer(tmp_path):
    """An interpreter for a peer that is not installed here: it notes its job and environment and answers at once. In seconds."""

    def make(tokens: int, seconds: list[float]) -> Path:
        answer = {"tokens": tokens, "seconds": seconds, "first_token_at": 2e9, "peak_memory_bytes": 100, "versions": {"v": "1"}}
        path = tmp_path / "python"
        path.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            f"open({str(tmp_path / 'seen.json')!r}, 'w').write(json.dumps({{'argv': sys.argv[1:3], 'env': dict(os.environ),"
            " 'job': json.load(open(sys.argv[3]))}))\n"
            f"open(sys.argv[4], 'w').write(json.dumps({answer!r}))\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    make.seen = lambda: json.loads((tmp_path / "seen.json").read_text())
    return make


# -- rollout


def test_rollout_counts_prompts_times_samples_times_new_tokens(model, capsys):
    argv = ("--model", model, "--dtype", "float32", "--samples", 3, "--new-tokens", 5, "--num-prompts", 2, "--repeats", 2)
    report = bench(capsys, "rollout", *argv, "--startups", 0)
    assert (report["prompts"], report["samples"], report["new_tokens"]) == (2, 3, 5)
    assert report["tokens"] == 2 * 3 * 5
    assert report["tokens_per_s"] == pytest.approx(30 / report["seconds"]["median"])
    check_spread(report["seconds"], 2)
    check_spread(report["tokens_per_s_runs"], 2)
    # The first token of each sample comes from the prefill; then every step draws one for each of them.
    assert report["decode"]["steps"] == 4
    assert report["decode"]["rows"] == 6
    assert report["decode"]["tokens"] == 4 * 6
    lengths = [len(ids) for ids in prompts.load_prompts(str(model), count=2)]
    assert report["prefill"]["tokens"] == sum(lengths)
    assert report["prompt_tokens"] == [min(lengths), max(lengths)]
    for phase in ("prefill", "decode"):
        mean = report[phase]["mean_ms"]
        assert mean["step"] == pytest.approx(sum(mean[part] for part in phases.PARTS))
        assert all(mean[part] > 0 for part in phases.PARTS)
    check_spread(report["gemm_floor_ms"], 20)
    assert report["decode_over_floor"] == pytest.approx(report["decode"]["step_ms"] / report["gemm_floor_ms"]["median"])
    assert report["bandwidth_share"] > 0
    assert report["startup_s"] is None
    assert report["preemptions"] == 0
    assert "ratio" not in report


def test_rollout_beside_transformers_in_a_process_of_its_own(model, capsys, monkeypatch):
    monkeypatch.chdir(model.parent)  # a relative path is meant from here
    argv = ("--samples", 2, "--new-tokens", 3, "--num-prompts", 2, "--prompt-tokens", 7, "--repeats", 2, "--threads", 1)
    report = bench(capsys, "rollout", "--model", model.name, *argv, "--peer", "hf")
    assert report["prompt_tokens"] == [7, 7]
    assert report["tokens"] == report["peer"]["tokens"] == 2 * 2 * 3
    check_spread(report["peer"]["tokens_per_s"], 2)
    assert report["ratio"] == pytest.approx(report["tokens_per_s"] / report["peer"]["tokens_per_s"]["median"])
    check_spread(report["startup_s"], 1)
    assert report["peer"]["startup_s"] > 0
    assert report["peer"]["peak_memory_bytes"] > 10 * 2**20


def test_a_peer_gets_the_ids_the_counts_and_its_own_environment(model, capsys, peer, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    file = model / "prompts.jsonl"
    file.write_text('{"prompt_ids": [5, 6, 7]}\n{"prompt_ids": [8, 9]}\n{"prompt_ids": [4]}\n')
    argv = ("--model", model, "--prompts", file, "--num-prompts", 2, "--samples", 2, "--new-tokens", 3, "--startups", 0)
    options = ("--peer", "vllm", "--peer-python", peer(12, [0.5, 0.25]), "--peer-env", "LD_PRELOAD=", "--peer-env", "A=b=c")
    report = bench(capsys, "rollout", *argv, "--repeats", 2, "--threads", 2, *options)
    seen = peer.seen()
    assert seen["argv"] == ["-m", "recipes.bench.peer_vllm"]
    job = {"prompts": [[5, 6, 7], [8, 9]], "samples": 2, "new_tokens": 3, "repeats": 2, "threads": 2, "dtype": "bfloat16"}
    assert {name: seen["job"][name] for name in job} == job
    assert (seen["env"]["A"], seen["env"]["OMP_NUM_THREADS"]) == ("b=c", "2")
    assert "OMP_WAIT_POLICY" not in seen["env"]
    assert report["peer"]["tokens_per_s"]["runs"] == [24, 48]
    assert report["ratio"] == pytest.approx(report["tokens_per_s"] / 36)
    assert report["peer"]["environment"] == {"LD_PRELOAD": "", "A": "b=c"}


# -- the others


def test_score_counts_response_tokens(model, capsys):
    argv = ("--model", model, "--samples", 2, "--new-tokens", 4, "--num-prompts", 2, "--prompt-tokens", 6, "--repeats", 2)
    report = bench(capsys, "score", *argv, "--dtype", "float32", "--startups", 0, "--hidden", "--peer", "hf")
    assert report["tokens"] == report["peer"]["tokens"] == 2 * 2 * 4
    assert report["tokens_given"] == 2 * 2 * 10
    assert report["mean_logprob"] == pytest.approx(report["peer"]["mean_logprob"], abs=1e-5)  # the same places of the same ids
    assert 0 < report["tokens_computed"] + report["tokens_hit"] <= report["tokens_given"]
    assert report["prefill"]["mean_ms"]["head"] > 0
    check_spread(report["seconds"], 2)
    check_spread(report["peer"]["seconds"], 2)
    assert report["over_floor"] == pytest.approx(report["seconds"]["median"] * 1e3 / report["gemm_floor_ms"]["median"])


def test_swap_times_each_stay_and_follows_memory(model, capsys):
    report = bench(capsys, "swap", "--model", model, "--dtype", "float32", "--swaps", 4, "--startups", 0)
    assert (report["swaps"], report["tokens"]) == (4, 5)
    for name in ("swap_ms", "enter_ms", "leave_ms", "stay_ms"):
        check_spread(report[name], 4)
    assert report["swap_ms"]["runs"] == pytest.approx(
        [a + b for a, b in zip(report["enter_ms"]["runs"], report["leave_ms"]["runs"])]
    )
    assert all(whole > part for whole, part in zip(report["stay_ms"]["runs"], report["swap_ms"]["runs"]))
    assert len(report["resident_bytes"]) == 5
    assert report["growth_bytes_per_swap"] == pytest.approx(measure.slope(report["resident_bytes"][3:]))
    assert report["gathered_bytes"] > 0


def test_opsd_times_whole_steps_of_the_training_loop(model, capsys, peer):
    argv = ("--model", model, "--dtype", "float32", "--num-prompts", 3, "--new-tokens", 4, "--repeats", 2, "--startups", 0)
    options = ("--peer", "trl", "--peer-python", peer(12, [3.0, 5.0]))
    report = bench(capsys, "opsd", *argv, *options)
    assert (report["prompts"], report["tokens"]) == (3, 3 * 4)
    check_spread(report["step_s"], 2)
    for phase in ("rollout", "score", "train"):
        check_spread(report["phase_s"][phase], 2)
    assert report["ratio"] == pytest.approx(4.0 / report["step_s"]["median"])
    assert report["memory_ratio"] == pytest.approx(report["peak_memory_bytes"] / 100)
    seen = peer.seen()
    assert seen["argv"][1] == "recipes.bench.peer_trl"
    assert (seen["job"]["num_prompts"], seen["job"]["new_tokens"]) == (3, 4)
    assert len(seen["job"]["prompts"]) == 16


@pytest.mark.parametrize("loss", ["cross_entropy", "reverse_kl"])
def test_loss_head_counts_its_gradients(capsys, loss):
    sizes = ("--tokens", 12, "--vocab", 50, "--hidden", 32, "--chunk-tokens", 5)
    report = bench(capsys, "loss-head", *sizes, "--loss", loss, "--repeats", 2)
    assert (report["tokens"], report["chunk_tokens"]) == (12, 5)
    assert report["gradient_bytes"] == 12 * 32 * 2 + 50 * 32 * 4
    assert report["beyond_gradients_bytes"] == report["memory_rise_bytes"] - report["gradient_bytes"]
    check_spread(report["seconds"], 2)
    check_spread(report["gemm_floor_s"], 3)


def test_scaling_changes_one_thing_at_a_time(capsys):
    argv = ("--sizes", "tiny", "2m", "--batches", 2, 1, "--contexts", 4, 8, "--new-tokens", 3, "--repeats", 2)
    report = bench(capsys, "scaling", *argv, "--dtype", "float32")
    assert [row["batch"] for row in report["batch"]] == [2, 1]
    assert [row["context"] for row in report["context"]] == [4, 8]
    assert [row["size"] for row in report["size"]] == ["tiny", "2m"]
    rows = {
        tuple(row[k] for k in ("size", "batch", "context")): row for axis in ("batch", "context", "size") for row in report[axis]
    }
    assert rows.keys() == {("tiny", 2, 4), ("tiny", 1, 4), ("tiny", 2, 8), ("2m", 2, 4)}
    for (_, batch, _), row in rows.items():
        assert row["tokens"] == batch * 3 * 3  # new tokens, and a warm-up beside two runs
        check_spread(row["decode_step_ms"], 2)
        check_spread(row["prefill_us_per_token"], 2)
    assert report["tokens"] == sum(row["tokens"] for row in rows.values())
    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
        tie_word_embeddings=True,
    )  # fmt: skip
    from transformers import LlamaForCausalLM

    assert rows["tiny", 2, 4]["parameters"] == sum(p.numel() for p in LlamaForCausalLM(config).parameters())


def test_without_json_every_number_is_a_line(model, capsys):
    argv = ("--model", model, "--num-prompts", 1, "--prompt-tokens", 4, "--new-tokens", 2, "--repeats", 1, "--startups", 0)
    assert main(["bench", "rollout", *map(str, argv)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tokens                       2" in lines
    assert any(line.startswith("  step_ms") for line in lines)
    assert not any("{" in line for line in lines)


# -- the parts


def test_watched_leaves_everything_as_it_was(model):
    opened = engines.open_engine(str(model), "float32")
    engine, logits = opened.engine, Head.logits
    sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)
    plain = engine.generate([(5, 6, 7), (8, 9)], sampling)
    opened.forget_prefixes()
    with phases.watched(engine) as steps:
        watched = engine.generate([(5, 6, 7), (8, 9)], sampling)
    assert [[c.token_ids for c in samples] for samples in watched] == [[c.token_ids for c in samples] for samples in plain]
    assert [(step.tokens, step.requests, step.is_decode) for step in steps] == [(5, 2, False), (2, 2, True), (2, 2, True)]
    assert Head.logits is logits
    assert "step" not in vars(engine)
    assert "forward" not in vars(engine.decoder)
    engine.generate([(5, 6, 7)], sampling)
    assert len(steps) == 3


def test_forgetting_prefixes_makes_every_run_prefill(model):
    opened = engines.open_engine(str(model), "float32")
    prompt, sampling = tuple(range(3, 43)), SamplingParams(max_new_tokens=1)
    hits = []
    for _ in range(2):
        opened.engine.generate([prompt], sampling)
        opened.forget_prefixes()
        hits.append(opened.engine.stats().tokens_hit)
    assert hits == [0, 0]
    opened.engine.generate([prompt], sampling)
    opened.engine.generate([prompt], sampling)
    assert opened.engine.stats().tokens_hit > 0  # so it would have hit


def test_the_floor_multiplies_every_weight_once(model):
    opened = engines.open_engine(str(model), "float32")
    spec = opened.engine.decoder.spec
    assert opened.fused is not None
    seen: list[tuple[int, int]] = []
    real = torch.nn.functional.linear
    for i in range(spec.num_layers):
        with opened.fused.layer(i) as layer:
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                product = linear.product
                linear.product = lambda x, product=product: seen.append((x.shape[0], x.shape[1])) or product(x)
    heads: list[tuple[int, int]] = []
    torch.nn.functional.linear = lambda x, *rest: heads.append(tuple(x.shape)) or real(x, *rest)
    try:
        floor.gemm_floor_ms(opened.fused, spec, 6, head_rows=4, passes=1)
    finally:
        torch.nn.functional.linear = real
    passes = 3  # two warm-ups
    assert seen == [(6, 64), (6, 64), (6, 64), (6, 96)] * spec.num_layers * passes
    assert heads == [(4, 64)] * passes
    parameters = sum(p.numel() for p in save_tiny_parameters(model))
    norms = (2 * spec.num_layers + 1) * 64
    embedding = spec.vocab_size * 64
    # layers with their norms, and the head: all but the embedding's table and the final norm
    assert floor.step_bytes(opened.fused) == 4 * (parameters - embedding - norms + 2 * spec.num_layers * 64)


def save_tiny_parameters(folder: Path):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors").values()


def test_random_weights_are_named_as_the_decoder_needs_them():
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                         vocab_size=64, tie_word_embeddings=True)  # fmt: skip
    opened = engines.random_engine(config, "float32")
    ((completion,),) = opened.engine.generate([(1, 2, 3)], SamplingParams(max_new_tokens=4))
    assert completion.error is None
    assert len(completion.token_ids) == 4


def test_questions_differ_and_go_through_the_chat_template(model):
    words = [len(question.split()) for question in prompts.QUESTIONS]
    assert len(set(prompts.QUESTIONS)) == 16
    assert min(words) >= 4
    assert max(words) <= 60
    tokenizer = character_tokenizer()
    first = prompts.load_prompts(str(model), count=1)[0]
    assert tokenizer.decode(first) == f"U: {prompts.QUESTIONS[0]}\nA: "


def test_made_up_prompts_have_one_length_and_no_common_start(model, tmp_path):
    made = prompts.load_prompts(str(model), count=20, tokens=40)
    assert {len(ids) for ids in made} == {40}
    assert len({ids[:16] for ids in made}) == 20
    save_tiny(tmp_path, "llama", tokenizer=None)
    bare = prompts.load_prompts(str(tmp_path), tokens=8)
    assert len(bare) == 16
    assert all(0 <= i < 96 for ids in bare for i in ids)


def test_spread_and_slope():
    assert measure.spread([3.0, 1.0, 8.0]) == {"median": 3.0, "min": 1.0, "max": 8.0, "runs": [3.0, 1.0, 8.0]}
    assert measure.slope([10, 12, 14]) == pytest.approx(2)
    assert measure.slope([5]) == 0
    calls = []
    assert len(measure.seconds_of(lambda: calls.append(0), 3)) == 3
    assert len(calls) == 4


@pytest.mark.skipif(not measure.reset_peak(), reason="the system does not let a process reset its peak")
def test_the_peak_is_of_what_came_after_its_reset():
    """In a process of its own: in one that has run other tests, what they freed serves again and the peak is lower."""
    code = """
import torch
from recipes.bench import measure

first = torch.ones(2**26)  # 256 MiB
before = measure.peak_resident_bytes()
del first
measure.reset_peak()
low = measure.peak_resident_bytes()
second = torch.ones(2**25)
print(before, low, measure.peak_resident_bytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, low, high = map(int, done.stdout.split())
    assert before - low > 2**27
    assert 2**27 <= high - low < 2**27 + 2**24


def test_memory_of_a_process_counts_its_children():
    child = "x = bytearray(50_000_000); print(1, flush=True); input()"
    code = f"""
import subprocess, sys
from recipes.bench.peer_job import tree_peak_bytes

own = tree_peak_bytes()
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(tree_peak_bytes() - own)
child.communicate(b"go")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=peers.ROOT)
    assert int(done.stdout) > 50_000_000


def test_peers_import_nothing_of_ours_but_the_job():
    """They run under interpreters that have nothing of ours."""
    for name in ("peer_hf", "peer_vllm", "peer_trl", "peer_job"):
        text = Path(importlib.util.find_spec(f"recipes.bench.{name}").origin).read_text()
        ours = [line for line in text.splitlines() if line.lstrip().startswith(("from recipes", "from inference", "from hybrid"))]
        assert all("recipes.bench.peer_job" in line for line in ours)
    code = "import sys, recipes.bench.peer_job; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=peers.ROOT)
    assert peer_job.tree_peak_bytes() > 0


# -- what is refused


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["rollout"], "--model"),
        ([], "BENCHMARK"),
        (["nonsense"], "nonsense"),
        (["rollout", "--model", "MODEL", "--repeats", "0"], "whole number >= 1"),
        (["rollout", "--model", "MODEL", "--samples", "x"], "whole number >= 1"),
        (["rollout", "--model", "MODEL", "--startups", "-1"], "whole number >= 0"),
        (["rollout", "--model", "MODEL", "--num-prompts", "17"], "allowed: 1 to 16"),
        (["rollout", "--model", "MODEL", "--prompt-tokens", "2000"], "refuses a prompt"),
        (["rollout", "--model", "MODEL", "--prompts", "nothing.jsonl"], "nothing.jsonl"),
        (["rollout", "--model", "MODEL", "--prompts", "nothing.jsonl", "--prompt-tokens", "4"], "one of them"),
        (["rollout", "--model", "./nothing"], "no such folder"),
        (["rollout", "--model", "MODEL", "--peer", "sglang"], "sglang"),
        (["rollout", "--model", "MODEL", "--peer-python", "/bin/true"], "give --peer too"),
        (["rollout", "--model", "MODEL", "--peer", "vllm", "--peer-python", "./nothing"], "allowed: the path of a Python"),
        (["rollout", "--model", "MODEL", "--peer", "vllm", "--peer-env", "LD_PRELOAD"], "NAME=VALUE"),
        (["score", "--model", "MODEL", "--peer", "vllm"], "vllm"),
        (["opsd", "--model", "BARE"], "no tokenizer"),
        (["opsd", "--model", "MODEL", "--prompts", "IDS"], "allowed here"),
        (["scaling", "--sizes", "huge"], "allowed: tiny"),
    ],
)
def test_bad_input_is_one_line(model, tmp_path_factory, capsys, argv, said):
    places = {"MODEL": model, "BARE": tmp_path_factory.mktemp("bare"), "IDS": tmp_path_factory.mktemp("ids") / "prompts.jsonl"}
    if "BARE" in argv:
        save_tiny(places["BARE"], "llama", tokenizer=None)
    places["IDS"].write_text('{"prompt_ids": [5]}\n')
    assert said in refused(capsys, *[str(places.get(text, text)) for text in argv])


def test_a_peer_that_fails_is_named_with_its_last_words(model, capsys, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho first\necho 'No module named vllm' >&2\nexit 3\n")
    broken.chmod(0o755)
    argv = ("--model", model, "--num-prompts", 1, "--prompt-tokens", 4, "--new-tokens", 2, "--repeats", 1, "--startups", 0)
    line = refused(capsys, "rollout", *argv, "--peer", "vllm", "--peer-python", broken)
    assert "peer_vllm" in line
    assert "exit 3" in line
    assert "No module named vllm" in line


def test_learning_runs_each_recipe_with_each_seed_once(tmp_path, capsys):
    """Real runs, with what is set for one recipe and for all; a finished one is read again."""
    models(tmp_path)
    tree = policy_settings("grpo", tmp_path, **{"data.eval": str(tmp_path / "sums.jsonl"), "rewards": [{"name": "format:[0-9]"}]})
    del tree["output_dir"]
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/a.yaml").write_text(
        yaml.safe_dump(tree | {"eval": {"reward": "format:[0-9]", "max_new_tokens": 3, "every": 1}})
    )
    argv = ["learning", "--recipes", f"{tmp_path}/toy/a.yaml max_steps=2", "--seeds", 3, "--target", 0.0,
            "--out", tmp_path / "out", "--set", "rollout.prompts_per_step=2", "--plot", tmp_path / "p.png"]  # fmt: skip
    found = []
    for _ in range(2):
        assert main(["bench", *map(str, argv), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    metrics = tmp_path / "out/toy_a_seed3/metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [r["step"] for r in records] == [0, 1, 2]
    assert all(r["generated_tokens"] <= 2 * 2 * 6 for r in records[1:])  # two prompts x two samples
    assert found[0]["tokens_to_target"] == found[1]["tokens_to_target"] == {"toy/a": {"by_seed": [0], "median": 0}}
    assert found[0]["settings"] == {"toy/a": "max_steps=2 rollout.prompts_per_step=2"}
    assert (tmp_path / "p.png").stat().st_size > 1000
    twice = [*argv[:2], "toy/a.yaml", "toy/a.yaml seed=1", *argv[3:]]
    assert main(["bench", *map(str, twice)]) == 2
    assert "toy/a twice" in capsys.readouterr().err
