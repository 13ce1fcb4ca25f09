"""Answers from transformers, in this process: always the same conversations together, so that the same seed gives the
same words whether a run was killed or not.

A batch's numbers depend a little on who else is in it (padding, kernels), so the loop hands over whole groups, cut by
their place in the input. Tokens are drawn from one uniform number a token, out of a generator of each answer's own:
the draw knows nothing of its neighbours. Leaves the search for a batch's end to transformers' own `generate`.

Letters: B answers at once, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from extractor.chat import ChatTokenizer
from extractor.engines.transformers import check_options, choose_device, load_model
from extractor.generate.settings import Sampling, Settings
from extractor.generate.sources.base import UNLIMITED, Ask, Reply, SourceInfo, end_ids, text_of
from extractor.quiet import transformers
from extractor.verifier import Verifier
from hsstore.errors import UsageError

_CANDIDATES = 1024


class Transformers:
    """A `Source` (extractor.generate.sources.base)."""

    def __init__(self, settings: Settings, verifier: Verifier, chat: ChatTokenizer, sampling: Sampling) -> None:
        transformers()  # before torch: it sets what torch reads when it loads
        import torch

        options = check_options(settings.dtype, dict(settings.engine_options))
        if "threads" in options:
            torch.set_num_threads(int(options["threads"]))
        self._device = choose_device(options.get("device"))
        model = load_model(verifier.path, settings.dtype, settings.trust_remote_code, options)
        try:
            self._model = model.to(self._device).eval()
        except torch.OutOfMemoryError:
            raise UsageError(
                f"{verifier.name} does not fit into the memory of {self._device}",
                hint="use --engine sglang with several GPUs, or --engine-option device=cpu",
            ) from None
        # What a generate() is not told it takes from here: a penalty that the parameters do not name, for one.
        self._model.generation_config = transformers().GenerationConfig()
        self._chat, self._sampling = chat, sampling
        self._ends = end_ids(verifier.path, chat)
        self._asks: list[Ask] = []
        self.group = settings.batch
        self.in_flight = settings.batch
        self.info = SourceInfo(
            engine="transformers",
            version=str(transformers().__version__),
            compute_dtype=str(self._model.dtype).removeprefix("torch."),
            context_tokens=verifier.context_tokens or UNLIMITED,
            flags={
                "attn_implementation": str(self._model.config._attn_implementation),
                "device": self._device.type,
                "threads": str(torch.get_num_threads()),
                "torch": str(torch.__version__),
            },
        )

    def submit(self, ask: Ask) -> None:
        self._asks.append(ask)

    def collect(self, on_tokens: Callable[[int], None]) -> list[Reply]:
        asks, self._asks = sorted(self._asks, key=lambda ask: ask.key), []
        return self._answer(asks, on_tokens)

    def restart(self) -> None:
        raise AssertionError("nothing is lost here but the process itself")

    def close(self) -> None:
        self._model = None
        self._asks.clear()

    def _answer(self, asks: Sequence[Ask], on_tokens: Callable[[int], None]) -> list[Reply]:
        import torch

        try:
            return self._generate(asks, on_tokens)
        except torch.OutOfMemoryError as error:
            detail = str(error).partition(".")[0]
        if len(asks) == 1:
            return [Reply(key=asks[0].key, error="out_of_memory", detail=detail)]
        half = len(asks) // 2  # outside of the handler, which holds the tensors of the failed try
        return self._answer(asks[:half], on_tokens) + self._answer(asks[half:], on_tokens)

    def _generate(self, asks: Sequence[Ask], on_tokens: Callable[[int], None]) -> list[Reply]:
        import torch

        library = transformers()
        n_prompt = max(len(ask.prompt_ids) for ask in asks)
        pad = self._ends[0] if self._ends else 0
        ids = torch.full((len(asks), n_prompt), pad)
        mask = torch.zeros((len(asks), n_prompt), dtype=torch.long)
        for i, ask in enumerate(asks):  # padded on the left: an answer follows its prompt
            ids[i, n_prompt - len(ask.prompt_ids) :] = torch.tensor(ask.prompt_ids)
            mask[i, n_prompt - len(ask.prompt_ids) :] = 1
        watch = _Watch(asks, n_prompt, self._ends, self._sampling.stop, self._chat, on_tokens)
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids.to(self._device),
                attention_mask=mask.to(self._device),
                generation_config=library.GenerationConfig(
                    max_new_tokens=max(ask.max_new_tokens for ask in asks),
                    do_sample=False,
                    pad_token_id=pad,
                    eos_token_id=list(self._ends) or None,
                ),
                logits_processor=library.LogitsProcessorList([_Draw(self._sampling, asks)]),
                stopping_criteria=library.StoppingCriteriaList([watch]),
            )
        answers = out[:, n_prompt:].tolist()
        return [self._reply(ask, row) for ask, row in zip(asks, answers, strict=True)]

    def _reply(self, ask: Ask, row: list[int]) -> Reply:
        end = next((i + 1 for i, token in enumerate(row) if token in self._ends), len(row))
        kept = row[: min(end, ask.max_new_tokens)]
        text = text_of(self._chat, kept, self._ends)
        finished = bool(kept) and kept[-1] in self._ends
        if self._sampling.stop and (cut := first_stop(text, self._sampling.stop)) is not None:
            return self._stopped(ask, kept, text[:cut])
        return Reply(
            key=ask.key,
            text=text,
            ids=tuple(kept),
            finish_reason="stop" if finished else "length",
            prompt_tokens=len(ask.prompt_ids),
            completion_tokens=len(kept),
        )

    def _stopped(self, ask: Ask, ids: list[int], text: str) -> Reply:
        """Cut at a stop string; how many tokens that took is the fewest whose text holds it."""
        n = next(
            n
            for n in range(1, len(ids) + 1)
            if first_stop(text_of(self._chat, ids[:n], self._ends), self._sampling.stop) is not None
        )
        return Reply(
            key=ask.key,
            text=text,
            finish_reason="stop",
            prompt_tokens=len(ask.prompt_ids),
            completion_tokens=n,
        )


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the first of the stop strings begins."""
    return min((at for s in stop if (at := text.find(s)) >= 0), default=None)


class _Draw:
    """Leaves one token a row: the one that is drawn. transformers' greedy search then takes it."""

    def __init__(self, sampling: Sampling, asks: Sequence[Ask]) -> None:
        self._sampling = sampling
        self._generators = [np.random.Generator(np.random.PCG64(ask.seed)) for ask in asks]

    def __call__(self, _ids: Any, scores_BV: Any) -> Any:
        import torch

        if self._sampling.temperature == 0:
            return scores_BV
        uniform = [generator.random() for generator in self._generators]
        uniform_B1 = torch.tensor(uniform, dtype=torch.float64, device=scores_BV.device)[:, None]
        chosen_B1 = draw(scores_BV, uniform_B1, self._sampling)
        return torch.full_like(scores_BV, -torch.inf).scatter_(1, chosen_B1, 0.0)


def draw(scores_BV: Any, uniform_B1: Any, sampling: Sampling) -> Any:
    """The token of each row at its place on the line from 0 to 1: likeliest tokens first, cut by top_k and top_p."""
    import torch

    chances_BV = torch.softmax(scores_BV.float() / sampling.temperature, dim=-1)
    kept_BK, tokens_BK = chances_BV, None
    if sampling.top_k or sampling.top_p < 1:
        # A sort of the whole vocabulary took six times as long as the softmax; 1,024 tokens nearly always suffice.
        n_tokens = chances_BV.shape[-1]
        kept_BK, tokens_BK = chances_BV.topk(min(sampling.top_k or _CANDIDATES, n_tokens))
        if not sampling.top_k and kept_BK.sum(-1).min() < sampling.top_p:
            kept_BK, tokens_BK = chances_BV.topk(n_tokens)
        whole = kept_BK.sum(-1, keepdim=True, dtype=torch.float64) if sampling.top_k else 1.0
        before_BK = kept_BK.cumsum(-1, dtype=torch.float64) - kept_BK
        kept_BK = kept_BK.masked_fill(before_BK > sampling.top_p * whole, 0)
    ends_BK = kept_BK.cumsum(-1, dtype=torch.float64)
    place_B1 = torch.searchsorted(ends_BK, uniform_B1 * ends_BK[:, -1:], right=True)
    last_B1 = (ends_BK < ends_BK[:, -1:]).sum(-1, keepdim=True)  # rounding must not lead beyond what is possible
    place_B1 = torch.minimum(place_B1, last_B1)
    return place_B1 if tokens_BK is None else tokens_BK.gather(1, place_B1)


@dataclass(slots=True, eq=False)
class _Watch:
    """After each token: which rows are at an end that transformers does not know, and how many tokens there are."""

    asks: Sequence[Ask]
    n_prompt: int
    ends: tuple[int, ...]
    stop: tuple[str, ...]
    chat: ChatTokenizer
    on_tokens: Callable[[int], None]

    def __call__(self, ids: Any, _scores: Any, **_: Any) -> Any:
        import torch

        n_new = ids.shape[1] - self.n_prompt
        over = torch.tensor([n_new >= ask.max_new_tokens for ask in self.asks], device=ids.device)
        if self.stop:
            for i, row in enumerate(ids[:, self.n_prompt :].tolist()):
                over[i] |= first_stop(text_of(self.chat, row, self.ends), self.stop) is not None
        ended = torch.isin(ids[:, self.n_prompt :], torch.tensor(self.ends, device=ids.device)).sum()
        self.on_tokens(int(ids[:, self.n_prompt :].numel() - ended))
        return over
