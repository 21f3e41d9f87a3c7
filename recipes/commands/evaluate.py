"""`hybrid eval`: score greedy completions of held-out prompts."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from recipes import launch
from recipes.data import make
from recipes.settings import SettingsError, explain

EXAMPLES = """\
examples:
  hybrid eval runs/demo/model --data made:addition/held_out --reward exact_match --max-new-tokens 5
  hybrid eval models/smollm2 --data questions.jsonl --reward 'regex:^Answer:' --max-new-tokens 24 --dtype bfloat16

rows have `prompt` (text or messages; text goes through the chat template if there is one, see --chat) and, where the reward
needs one, `answer`. Rewards: exact_match, numeric_match, math_verify, regex:PATTERN (found), format:PATTERN (matches all of it),
module:function of (completion, prompt), or the URL of a server.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "eval",
        help="score greedy completions of held-out prompts",
        description="Complete prompts greedily and print the mean reward.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder or hub name")
    parser.add_argument("--data", required=True, metavar="FILE", help="JSONL, parquet, a hub name, or made:NAME/SPLIT")
    parser.add_argument("--reward", default="exact_match", metavar="NAME")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="the first N rows only")
    parser.add_argument("--chat", choices=("auto", "always", "never"), default="auto", help="chat template for text prompts")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a line")
    return parser


def run(args: argparse.Namespace) -> int:
    from pydantic import ValidationError

    from hybrid.config import HybridConfig
    from trainers.config import DataConfig, EvalConfig

    with tempfile.TemporaryDirectory() as folder:
        source = str(make(args.data, Path(folder)))
        try:
            config = EvalConfig(reward=args.reward, max_new_tokens=args.max_new_tokens, samples=0)
            data = DataConfig(train=source, eval=source, eval_split="test", chat=args.chat, max_eval=args.limit)
        except ValidationError as error:
            raise SettingsError(*explain(error, EvalConfig if error.title == "EvalConfig" else DataConfig)) from None

        from hybrid.engine import HybridEngine
        from trainers.data.prompts import load_prompts
        from trainers.evaluation import Evaluator

        engine = HybridEngine.from_pretrained(args.model, HybridConfig(compute_dtype=args.dtype, device=args.device))
        if engine.tokenizer is None:
            raise ValueError(f"{args.model} has no tokenizer, which an evaluation needs")
        prompts = load_prompts(data, engine.tokenizer, held_out=True).prompts
        evaluator = Evaluator(config, prompts)
        evaluation = evaluator.run(engine)
        evaluator.close()
        engine.close()
    if launch.is_main_rank():
        record = {"num_prompts": evaluation.num_prompts, "reward": evaluation.reward, "length": evaluation.length}
        if evaluation.failures:
            record["reward_failures"] = evaluation.failures
        readable = (
            f"{args.reward}: {evaluation.reward:.1%} of {evaluation.num_prompts} prompts, {evaluation.length:.1f} tokens each"
            + (f"; the reward failed for {evaluation.failures}, which count as 0" if evaluation.failures else "")
        )
        print(json.dumps(record) if args.json else readable)
    return 0
