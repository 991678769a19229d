"""Writes a model's weights in bfloat16 as a Hugging Face directory, for peers that read nothing else.

python bench/compare/write_directory.py MODEL DIRECTORY
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace.formats.open import open_checkpoint

checkpoint, place = open_checkpoint(sys.argv[1]), Path(sys.argv[2])
place.mkdir(parents=True, exist_ok=True)
tensors = {name: checkpoint.read(name).dequantize(torch.bfloat16) for name in checkpoint.shapes()}
save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
(place / "config.json").write_text(json.dumps(checkpoint.config | {"torch_dtype": "bfloat16"}, indent=1))
(place / "generation_config.json").write_text(json.dumps(checkpoint.generation_config, indent=1))
checkpoint.tokenizer().save(place)
(place / "done").touch()
