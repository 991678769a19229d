"""llama.cpp through its C functions, as its own benchmarks use them: many sequences in one batch, greedy."""

import ctypes
from typing import Any

import llama_cpp as c
import numpy as np
from protocol import Peer, serve

BATCH = 2048  # tokens handed over at once


class LlamaCpp(Peer):
    def __init__(self, settings: dict[str, Any]) -> None:
        c.llama_backend_init()
        params = c.llama_model_default_params()
        self.model = c.llama_model_load_from_file(settings["model"].encode(), params)
        assert self.model, "the model cannot be loaded"
        context = c.llama_context_default_params()
        context.n_ctx = settings["max_model_len"] * settings["max_num_seqs"]
        context.n_batch = BATCH
        context.n_seq_max = settings["max_num_seqs"]
        context.n_threads = context.n_threads_batch = settings["threads"]
        context.flash_attn_type = 1 if settings["flash_attention"] else 0
        context.no_perf = True
        self.context = c.llama_init_from_model(self.model, context)
        assert self.context, "no context"
        self.vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        self.batch = c.llama_batch_init(BATCH, 0, 1)
        flash = "on" if settings["flash_attention"] else "off"
        self.about = f"llama-cpp-python {c.__version__}, flash attention {flash}"

    def run(self, prompts: list[list[int]], output_len: int) -> None:
        c.llama_memory_clear(c.llama_get_memory(self.context), True)
        last = [0] * len(prompts)
        work = [(token, at, seq, at == len(ids) - 1) for seq, ids in enumerate(prompts) for at, token in enumerate(ids)]
        for start in range(0, len(work), BATCH):
            for seq, token in self._decode(work[start : start + BATCH]):
                last[seq] = token
        for step in range(output_len - 1):
            places = [(last[seq], len(ids) + step, seq, True) for seq, ids in enumerate(prompts)]
            for seq, token in self._decode(places):
                last[seq] = token

    def score(self, ids: list[int]) -> list[float]:
        c.llama_memory_clear(c.llama_get_memory(self.context), True)
        self._fill([(token, at, 0, True) for at, token in enumerate(ids)])
        logits = np.stack([self._logits(i) for i in range(len(ids) - 1)]).astype(np.float64)
        logits -= logits.max(1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        found: list[float] = logits[np.arange(len(ids) - 1), ids[1:]].tolist()
        return found

    def _decode(self, work: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Runs (token, position, sequence, whether logits are wanted). Returns sequences and their likeliest tokens."""
        self._fill(work)
        return [(seq, int(self._logits(i).argmax())) for i, (_, _, seq, wanted) in enumerate(work) if wanted]

    def _fill(self, work: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(work)
        for i, (token, position, seq, wanted) in enumerate(work):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = seq
        status = c.llama_decode(self.context, batch)
        assert status == 0, f"llama_decode: {status}"

    def _logits(self, i: int) -> np.ndarray:
        row = c.llama_get_logits_ith(self.context, i)
        return np.ctypeslib.as_array(ctypes.cast(row, ctypes.POINTER(ctypes.c_float)), (self.vocab,))


serve(LlamaCpp)
