"""Which layers, which side of the norm, which model: what an import takes the states for, and how it knows.

Every answer is said by the caller, recorded beside the files, or a default of the project that has no second way.
What can be none of these is refused. How each was found stands in the capture's flags under `import.…`.
"""

from __future__ import annotations

from dataclasses import dataclass

from extractor.foreign.conventions import Convention
from extractor.foreign.facts import Facts
from extractor.foreign.record import NAME, ExportRecord
from extractor.foreign.sample import Norm
from extractor.foreign.settings import ImportSettings
from extractor.verifier import Verifier
from hsstore.errors import ConflictError, UsageError
from hsstore.modeldigest import SAMPLED_FLAG
from hsstore.records import Capture, spelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What the files of an import are taken for, but for their width, which they say themselves."""

    layers: tuple[str, ...]
    """`after_k` names, then `final`."""
    norm: Norm
    n_layers: int
    vocab_size: int
    flags: dict[str, str]
    norm_is_declared: bool
    """Whether the side of the norm was read from a file, so that all of them have to say it."""


class Question:
    """The settings of one import beside all that its directory and its model say."""

    def __init__(
        self,
        settings: ImportSettings,
        convention: Convention,
        facts: Facts,
        record: ExportRecord | None,
        verifier: Verifier | None,
    ) -> None:
        self.settings, self.convention, self.facts = settings, convention, facts
        self.record, self.verifier = record, verifier
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        settings, verifier = self.settings, self.verifier
        if settings.layers and settings.layer_ids:
            raise UsageError("--layers and --layer-ids say the same thing in two numberings", hint="give one of them")
        if self.record is not None:
            if self.record.target != self.convention.name:
                hint = f"import it as {self.record.target}"
                raise ConflictError(f"{NAME} says that this directory is {self.record.target}", hint=hint)
            captured = self.record.capture.config_sha256
            if verifier is not None and captured and captured != verifier.config_sha256:
                raise ConflictError(
                    f"{NAME} says that the states are of {self.record.capture.model}, --model is another",
                    hint="give that model, or leave --model out",
                )
        if verifier is not None:
            self._same("--n-layers", settings.n_layers, verifier.n_layers, f"the model {verifier.name}")
            self._same("--vocab-size", settings.vocab_size, verifier.vocab_size, f"the model {verifier.name}")

    @staticmethod
    def _same(option: str, given: object, known: object, where: str) -> None:
        if given is not None and known is not None and given != known:
            raise ConflictError(f"{option} is {given}, {where} says {known}", hint=f"leave {option} out, or correct it")

    def answer(self, declared: Norm | None) -> Assumed:
        """All of it. `declared` is what the first readable file says of its norm."""
        n_layers, vocab_size = self._size("n_layers"), self._size("vocab_size")
        norm, norm_from, is_declared = self._norm(declared)
        ks, layers_from = self._layers(n_layers, norm)
        flags = {"import": self.convention.name, "import.layers": layers_from, "import.norm": norm_from}
        if self.verifier is not None:
            flags["import.model"] = "given, not compared with the states"
        if self.record is not None:
            flags["import.manifest"] = self.record.manifest_id
        if self.settings.cast:
            flags["import.cast"] = "to bfloat16"
        if self.settings.mask_missing == "ones":
            flags["import.mask"] = "ones where there is none"
        return Assumed(
            layers=(*(f"after_{k}" for k in ks), "final"),
            norm=norm,
            n_layers=n_layers,
            vocab_size=vocab_size,
            flags=flags,
            norm_is_declared=is_declared,
        )

    def _size(self, name: str) -> int:
        value: int | None = getattr(self.settings, name)
        if self.record is not None:
            self._same(f"--{name.replace('_', '-')}", value, getattr(self.record.capture, name), NAME)
        for source in (self.verifier, self.record.capture if self.record else None):
            value = value or getattr(source, name, None)
        if value is None:
            raise UsageError(
                f"{self.convention.name} files do not say which model they are from: no {name.replace('_', ' ')}",
                hint="give --model DIR, or both --n-layers and --vocab-size",
            )
        return value

    def _norm(self, declared: Norm | None) -> tuple[Norm, str, bool]:
        recorded, where = self.facts.norm, self.facts.source
        if self.record is not None:
            recorded, where = self.record.capture.norm, NAME
        self._same("--norm", self.settings.norm, recorded, where)
        if recorded is not None:
            return recorded, f"recorded in {where}", False
        if self.settings.norm is not None:
            return self.settings.norm, "given", False
        if declared is not None:
            return declared, "recorded in each file", True
        if self.convention.norm is not None:
            return self.convention.norm, f"always so in {self.convention.name}", False
        raise UsageError(
            f"these {self.convention.name} files do not say whether their final state is after the model's final norm",
            hint="give --norm post (SGLang, transformers, TensorRT-LLM) or --norm pre (vLLM)",
        )

    def _layers(self, n_layers: int, norm: Norm) -> tuple[list[int], str]:
        settings, offset = self.settings, self.convention.offset
        recorded = self._recorded_layers(n_layers)
        if settings.layers is not None:
            given = _numbers("--layers", settings.layers, 0, n_layers)
            self._same("--layers", given, recorded, self.facts.source or NAME)
            return given, "given"
        if settings.layer_ids is not None:
            ids = _numbers("--layer-ids", settings.layer_ids, offset, n_layers)
            self._same("--layer-ids", [i + offset for i in ids], recorded, self.facts.source or NAME)
            return [i + offset for i in ids], f"given as ids {','.join(map(str, ids))} of {self.convention.name}"
        if recorded is not None:
            return recorded, f"recorded in {NAME if self.record else self.facts.source}"
        return self.convention.default_layers(n_layers, norm), f"default of {self.convention.name}"

    def _recorded_layers(self, n_layers: int) -> list[int] | None:
        if self.record is not None:
            return [int(name.removeprefix("after_")) for name in self.record.capture.layers[:-1]]
        if not self.facts.layer_ids:
            return None
        last = self.facts.last_id
        if last is not None and last + self.convention.offset != n_layers:
            raise ConflictError(
                f"{self.facts.source} says that the last state is that of id {last}, the model has {n_layers} layers",
                hint="only files whose last state is the final one can be imported",
            )
        return [i + self.convention.offset for i in self.facts.layer_ids]

    def capture(self, assumed: Assumed, hidden_size: int, weights_sha256: str) -> Capture:
        """The capture record of the store."""
        verifier, record, settings = self.verifier, self.record, self.settings
        sampled = dict([SAMPLED_FLAG]) if verifier and settings.weights_digest == "sampled" else {}
        if record is not None and (verifier is None or record.capture.config_sha256):
            kept = record.capture.flags | assumed.flags
            return record.capture.with_layers(assumed.layers, norm=assumed.norm, hidden_size=hidden_size, flags=kept)
        return Capture(
            model=settings.model_name or (verifier.name if verifier else "unknown"),
            architecture=verifier.architecture if verifier else "unknown",
            revision=verifier.revision if verifier else "",
            weights_sha256=weights_sha256,
            config_sha256=verifier.config_sha256 if verifier else "",
            tokenizer_sha256=verifier.tokenizer_sha256 if verifier else "",
            chat_template_sha256=verifier.chat_template_sha256 if verifier else "",
            layers=assumed.layers,
            layer_ids=spelled(assumed.layers),
            norm=assumed.norm,
            hidden_size=hidden_size,
            vocab_size=assumed.vocab_size,
            n_layers=assumed.n_layers,
            dtype="bfloat16",
            engine=record.capture.engine if record else self.convention.name,
            engine_version=self.facts.version,
            compute_dtype="unknown",
            flags=assumed.flags | sampled,
        )


def _numbers(option: str, text: str, offset: int, n_layers: int) -> list[int]:
    """Ascending numbers whose k = number + offset lies inside the model."""
    parts = [part.strip().removeprefix("after_") for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 6 for part in parts):
        raise UsageError(f"{option} takes numbers like 2,15,27, found {text[:40]!r}")
    numbers = [int(part) for part in parts]
    if sorted(set(numbers)) != numbers:
        raise UsageError(f"{option} {text[:40]} is not ascending", hint="name the states in the order of the layers")
    if numbers[-1] + offset >= n_layers:
        raise UsageError(
            f"{option} {text[:40]}: {numbers[-1]} is beyond the auxiliary states of {n_layers} layers",
            hint=f"give numbers up to {n_layers - 1 - offset}; the final state is always there",
        )
    return numbers
