"""`hybrid generate`: complete the prompts of a JSONL file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference_v2 import Completion

EXAMPLES = """\
each line of FILE.jsonl is one of
  {"prompt": "Once upon a time"}                                 no chat template, the tokenizer's default special tokens
  {"prompt": [{"role": "user", "content": "What is 2 + 2?"}]}    messages, through the chat template
  {"prompt_ids": [1, 17, 42]}                                    ids as they are; needs no tokenizer

with --json, one object per completion:
  prompt_index, sample_index, token_ids, text, logprobs, logprobs_raw, finish_reason
  logprobs: under the distribution sampled from; logprobs_raw: log_softmax(z / temperature). A request that is refused (an empty
  prompt, ids outside of the vocabulary, no room for it) has finish_reason "abort" and an "error"; the others go on.

example:
  hybrid generate runs/demo/model --prompts prompts.jsonl --max-new-tokens 8 --temperature 0 --json
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "generate",
        help="complete the prompts of a JSONL file",
        description="Complete the prompts of a JSONL file with a Hugging Face folder or hub model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder or hub name")
    parser.add_argument("--prompts", required=True, metavar="FILE.jsonl", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy; default 1")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default 1: no truncation")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="default 0: no truncation")
    parser.add_argument("--samples", type=int, default=1, metavar="S", help="completions per prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON object per completion")
    return parser


def run(args: argparse.Namespace) -> int:
    from inference_v2 import InferenceEngine, SamplingParams

    sampling = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        num_samples=args.samples,
        seed=args.seed,
    )
    rows = read_rows(args.prompts)
    engine = InferenceEngine.from_pretrained(args.model, dtype=args.dtype, device=args.device)
    requests = [encode(row, engine.tokenizer) for row in rows]
    good = [index for index, request in enumerate(requests) if request.error is None]
    completed = engine.generate([requests[i].ids for i in good], sampling, keys=good)
    by_prompt = dict(zip(good, completed))
    for index, (row, request) in enumerate(zip(rows, requests)):
        for record in _records(index, request, by_prompt.get(index, [])):
            print(json.dumps(record, ensure_ascii=False) if args.json else _readable(row, record))
    return 0


@dataclass(frozen=True)
class EncodedPrompt:
    """A line of the prompts file as ids, or why it cannot be completed."""

    ids: tuple[int, ...] = ()
    error: str | None = None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a prompts file. Raises ValueError for a file without any, and naming the first line that
    is not one JSON object with one prompt."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(row, dict) or ("prompt" in row) == ("prompt_ids" in row):
            raise ValueError(f'{path}:{number}: allowed: an object with one of "prompt" (text or messages) and "prompt_ids"')
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: holds no prompt; allowed: one JSON object a line")
    return rows


def encode(row: dict[str, Any], tokenizer: Any) -> EncodedPrompt:
    """Ids of one request: text with the tokenizer's default special tokens, messages through its chat template."""
    from trainers.data.templates import encode_messages, read_content

    ids = row.get("prompt_ids")
    try:
        if "prompt" in row:
            content = read_content(row["prompt"], column="prompt")
            if tokenizer is None:
                return EncodedPrompt(error="the model has no tokenizer; give prompt_ids")
            if not content:
                return EncodedPrompt(error="the prompt is empty")
            if isinstance(content, str):
                ids = tokenizer(content)["input_ids"]
            elif not getattr(tokenizer, "chat_template", None):
                return EncodedPrompt(error="messages need a chat template and the tokenizer has none; give text")
            else:
                ids = encode_messages(tokenizer, content)
    except ValueError as error:
        return EncodedPrompt(error=" ".join(str(error).split()))
    if not isinstance(ids, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        return EncodedPrompt(error=f"prompt_ids is {str(ids)[:60]}; allowed: a list of whole numbers")
    return EncodedPrompt(tuple(ids)) if ids else EncodedPrompt(error="the prompt is empty")


def _records(index: int, request: EncodedPrompt, completions: list[Completion]) -> Iterator[dict[str, Any]]:
    if request.error is not None:
        yield _record(index, error=request.error)
    for c in completions:
        yield _record(
            index,
            c.sample_index,
            list(c.token_ids),
            None if c.error else c.text,
            list(c.logprobs),
            list(c.logprobs_raw),
            c.finish_reason,
            c.error,
        )


def _record(
    prompt_index: int,
    sample_index: int = 0,
    token_ids: list[int] | None = None,
    text: str | None = None,
    logprobs: list[float] | None = None,
    logprobs_raw: list[float] | None = None,
    finish_reason: str = "abort",
    error: str | None = None,
) -> dict[str, Any]:
    record = {
        "prompt_index": prompt_index,
        "sample_index": sample_index,
        "token_ids": token_ids or [],
        "text": text,
        "logprobs": logprobs or [],
        "logprobs_raw": logprobs_raw or [],
        "finish_reason": finish_reason,
    }
    return record if error is None else {**record, "error": error}


def _readable(row: dict[str, Any], record: dict[str, Any]) -> str:
    prompt = row.get("prompt", row.get("prompt_ids"))
    shown = prompt[-1]["content"] if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict) else prompt
    answer = record.get("error") or (record["token_ids"] if record["text"] is None else record["text"])
    return f"[{record['prompt_index']}.{record['sample_index']}] {shown}\n  -> {answer} ({record['finish_reason']})"
