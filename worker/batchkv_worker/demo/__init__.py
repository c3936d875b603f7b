"""A small trained model whose answers can be checked, shipped as package data.

It answers questions about a ledger of facts in its prompt. A KV cache that loses, mixes up or
garbles a row therefore shows as a wrong answer, which random weights would never tell.
``tools/demo_model`` trains it, which is no part of the wheel.
"""

from pathlib import Path

MODEL_PATH = Path(__file__).parent / "model"
"""A directory that `mlx_lm.load` takes: config, weights, tokenizer and chat template."""
