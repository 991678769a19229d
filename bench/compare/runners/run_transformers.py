"""transformers in float32: the oracle, and the slow baseline."""

from pathlib import Path
from typing import Any

import torch
import transformers
from protocol import Peer, serve


class Transformers(Peer):
    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        path = Path(settings["model"])
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        self.about = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], output_len: int) -> None:
        ids = torch.tensor(prompts)
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=output_len, max_new_tokens=output_len,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip

    @torch.inference_mode()
    def score(self, ids: list[int]) -> list[float]:
        logprobs = self.model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        found: list[float] = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return found


serve(Transformers)
