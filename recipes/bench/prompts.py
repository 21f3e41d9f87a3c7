"""What is asked: built-in questions, a file's prompts, or token sequences of one length."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

QUESTIONS = (
    "Which planet in our solar system has the most moons?",
    "Write a haiku about an old bicycle leaning against a garden wall in the rain.",
    "My bread comes out dense and gummy even though I follow the recipe exactly. The yeast is fresh, I knead for ten minutes and "
    "let it rise for an hour in a cool kitchen. What are the three most likely causes, and how could I test each of them one at "
    "a time without wasting a whole bag of flour?",
    "Explain how a hash table works.",
    "A shop sells pencils in packs of 12 and erasers in packs of 8. What is the smallest number of each pack that I must buy to "
    "have exactly as many pencils as erasers?",
    "Give two synonyms for cheerful.",
    "Why do some leaves turn red in autumn while others turn yellow or brown?",
    "Draft a short and polite email to a neighbour whose dog barks at night, asking to talk about it over a cup of tea.",
    "How long does light from the Sun take to reach the Earth?",
    "Compare sailing and rowing as hobbies for somebody who lives near a lake, has little money, works late on weekdays, and "
    "wants to get fitter within a year. Mention costs, weather, and how easy it is to find company.",
    "Name the longest river in South America.",
    "In one paragraph, tell the story of a lighthouse keeper who receives a letter that was posted forty years ago.",
    "What does the word serendipity mean, and where does it come from?",
    "I have 340 euros. Rent takes half, food a quarter of what is left, and I save the rest. How much do I save? Show each step.",
    "Suggest a name for a friendly robot.",
    "Describe what happens inside a kettle from the moment it is switched on until the water boils, as you would to a curious "
    "nine-year-old, and end with a question that she could investigate herself.",
)


def load_prompts(
    model: str, *, file: Path | None = None, count: int | None = None, tokens: int | None = None
) -> list[tuple[int, ...]]:
    """Ids of `count` prompts (None: all there are): the questions above or the rows of `file`, through the chat template where
    there is one; or, with `tokens`, mixtures of their ids of exactly that many tokens, no two of them with a common start.

    Raises ValueError for a file or a row that cannot be used, and for more prompts than there are.
    """
    from inference_v2.loading import load_config, load_tokenizer, resolve
    from recipes.commands.generate import read_rows

    folder = resolve(model)
    tokenizer = load_tokenizer(folder)
    if tokens is not None:
        if file is not None:
            raise ValueError("--prompt-tokens with --prompts; allowed: one of them, a file has lengths of its own")
        if tokenizer is None:
            pool = list(range(load_config(folder).get_text_config().vocab_size))
        else:
            pool = sorted({token for question in QUESTIONS for token in _encode({"prompt": question}, tokenizer)})
        numbers = range(len(QUESTIONS) if count is None else count)
        return [tuple(random.Random(number).choices(pool, k=tokens)) for number in numbers]
    rows = [{"prompt": question} for question in questions(tokenizer)] if file is None else read_rows(file)
    if count is not None and count > len(rows):
        raise ValueError(f"--num-prompts {count}; allowed: 1 to {len(rows)}, what there is, or any number with --prompt-tokens")
    return [_encode(row, tokenizer) for row in rows[:count]]


def questions(tokenizer: Any) -> list[str | list[dict[str, str]]]:
    """The built-in questions as messages, or as text for a tokenizer without a chat template."""
    if getattr(tokenizer, "chat_template", None):
        return [[{"role": "user", "content": question}] for question in QUESTIONS]
    return list(QUESTIONS)


def _encode(row: dict[str, Any], tokenizer: Any) -> tuple[int, ...]:
    from recipes.commands.generate import encode

    encoded = encode(row, tokenizer)
    if encoded.error is not None:
        raise ValueError(f"prompt {str(row)[:60]}: {encoded.error}; or give --prompt-tokens")
    return encoded.ids
