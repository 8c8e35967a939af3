"""A language model with its tokenizer, from a run, a checkpoint or a Hugging Face folder, to generate and to evaluate.

Models of transformers, and ours with its MoE layers in them, generate with `generate` of transformers; a GPT has no
class there, and generates with `models.generation`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_lightning.checkpoint.inspect import end_of_text, tokenizer_origin, trained_tokenizer
from moe_lightning.checkpoint.storage import place_of
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.cli.resume import config_of
from moe_lightning.cli.saved_model import network_of, open_saved, other_tokenizer, trained_config
from moe_lightning.config import TARGET
from moe_lightning.data.chat_formats import ChatFormat, chat_format, hugging_face_tokenizer, templated_turns
from moe_lightning.data.corpus import DataSource, end_of_documents, tokenizer_of
from moe_lightning.data.documents import STDLIB
from moe_lightning.data.text import sources_of
from moe_lightning.data.tokenizer import (
    BYTES,
    ByteTokenizer,
    Tokenizer,
    errors_of_package,
    is_trained,
    load_tokenizer,
    refusal,
    tokenizer_from,
)
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.hub import CONFIG, GENERATION, TOKENIZER, TOKENIZERS, local_folder, local_tokenizer, tokenizer_file
from moe_lightning.models.generation import Sampling, check_logits, generate
from moe_lightning.models.gpt import GPT
from moe_lightning.models.huggingface.loading import known_tokens, transformers

_MOST_EVALUATED = 1024
"""Tokens of a window of a model whose training is not known."""

_OTHER_MODES = (
    "assistant_early_exit", "cache_implementation", "constraints", "dola_layers", "force_words_ids", "penalty_alpha",
    "prompt_lookup_num_tokens", "token_healing", "use_mtp",
)  # fmt: skip
"""Options of a folder by which transformers would make several tokens at a time, from other logits or with code and
packages that may not be here."""


@dataclass(frozen=True)
class TrainedText:
    """Tokens of texts as a run was trained on them.

    Attributes:
        tokenizer: of the run.
        spec: names it; empty for one that the run has trained.
    """

    tokenizer: Tokenizer
    spec: str

    def begin(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        tokens: list[int] = self.tokenizer.encode(text)[0].tolist()
        return tokens

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self.tokenizer.decode(ids)

    @cached_property
    def theirs(self) -> Any | None:
        """Tokenizer of transformers, with its special tokens; None for one without a folder."""
        if self.spec in ("", BYTES):
            return None
        file = tokenizer_file(self.spec)
        return hugging_face_tokenizer(file.parent, for_text=True) if file.name == TOKENIZER else None


class PretrainedText:
    """Tokens of texts as transformers makes them, with those that begin a text.

    Args:
        folder: of a tokenizer.

    Attributes:
        spec: names its tokenizer.json.
        theirs: tokenizer of transformers.
    """

    def __init__(self, folder: Path) -> None:
        self.spec = str(folder / TOKENIZER)
        self.theirs: Any = hugging_face_tokenizer(folder, for_text=True)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of text that does not begin here."""
        return load_tokenizer(self.spec)

    def begin(self, text: str) -> list[int]:
        """Return the tokens of a text from its beginning."""
        with errors_of_package(refusal):
            tokens: list[int] = self.theirs(text)["input_ids"]
        return tokens

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        with errors_of_package(refusal):
            text: str = self.theirs.decode(ids)
        return text


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A model in evaluation mode, with its tokenizer.

    Attributes:
        name: for messages.
        network: a GPT, or a model of transformers.
        text: makes tokens of texts and texts of tokens.
        context_length: tokens of the samples that it was trained on.
        ends: tokens that end a text.
        data: configuration of the data of its training; empty where that is not known.
    """

    name: str
    network: Any
    text: TrainedText | PretrainedText
    context_length: int
    ends: frozenset[int]
    data: Mapping[str, Any]

    @property
    def positions(self) -> int:
        """Most tokens of a sequence."""
        if self.is_ours:
            return int(self.network.config.context_length)
        return _positions(self.network)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.network.parameters()).device
        return device

    def check(self, ids: Sequence[int], what: str = "the prompt") -> None:
        """
        Raises:
            ConfigurationError: the model cannot continue these tokens.
        """
        if not ids:
            raise ConfigurationError(f"{what} is empty: give some text")
        if len(ids) > self.positions:
            raise ConfigurationError(
                f"{what} has {len(ids):,} tokens, more than the {self.positions:,} of the context of {self.name}: "
                "shorten it"
            )
        self.check_known(ids, what)

    def check_known(self, ids: Sequence[int] | NDArray[np.int64], what: str) -> None:
        """
        Raises:
            ConfigurationError: one of these tokens is not in the model's vocabulary.
        """
        embedding = self.network.token_embedding if self.is_ours else self.network.get_input_embeddings()
        if (largest := int(np.max(ids, initial=0))) >= embedding.num_embeddings:
            raise ConfigurationError(
                f"{what} has the token {largest}, and {self.name} knows {embedding.num_embeddings}: give with "
                "--tokenizer the one that it was trained with"
            )

    @property
    def theirs(self) -> Any | None:
        """Tokenizer of transformers, with its special tokens; None for a GPT, and for a tokenizer without a folder."""
        return None if self.is_ours else self.text.theirs

    def chat(self) -> ChatFormat:
        """Return the format of conversations.

        Raises:
            ConfigurationError: none is known.
        """
        spec = self.text.spec
        if str(self.data.get(TARGET)).endswith(".InstructionData"):
            return chat_format(spec, self.data.get("end_token"))
        templated = None if spec in ("", BYTES) else templated_turns(tokenizer_file(spec).parent)
        if templated is None:
            raise ConfigurationError(
                f"{self.name} has no chat template, nor the configuration of a run that was trained on conversations: "
                "only a text can be continued or measured"
            )
        return templated

    @property
    def is_ours(self) -> bool:
        """True for a GPT."""
        return isinstance(self.network, GPT)

    def generate(
        self, ids: Sequence[int], sampling: Sampling, max_new_tokens: int, is_done: Callable[[int], bool]
    ) -> None:
        """Continue a text.

        Args:
            ids: its tokens, see `check`.
            is_done: called with each new token; True ends the text.

        Raises:
            ConfigurationError: the model ends texts at strings, and its tokenizer is not one of transformers.
        """
        if self.is_ours:
            for token in generate(self.network, ids, sampling, max_new_tokens):
                if is_done(token):
                    return
            return
        if (room := self.positions - len(ids)) < 1:
            return

        def stop(ids_BL: Tensor, *_: Any, **__: Any) -> Tensor:
            return torch.tensor([is_done(int(ids_BL[0, -1]))], device=ids_BL.device)

        def checked(_: Tensor, logits_BV: Tensor) -> Tensor:
            check_logits(logits_BV)
            return logits_BV

        defaults = self.network.generation_config
        options = sampling.options() | {
            name: None for name in _OTHER_MODES if getattr(defaults, name, None) is not None
        }
        if defaults.stop_strings:
            options["tokenizer"] = self.theirs
            if self.theirs is None:
                raise ConfigurationError(
                    f"{GENERATION} of {self.name} has stop_strings, for which transformers needs a tokenizer.json of "
                    "that name: give one with --tokenizer, or remove stop_strings"
                )
        ids_BL = torch.tensor([ids], device=self.device)
        self.network.generate(
            input_ids=ids_BL,
            attention_mask=torch.ones_like(ids_BL),
            max_new_tokens=min(max_new_tokens, room),
            stopping_criteria=[stop],
            logits_processor=[checked],
            **options,
        )

    def logits(self, ids_BL: Tensor, is_token_BL: Tensor) -> Tensor:
        """Logits [B, L, V] of sequences that may be padded at their ends."""
        if self.is_ours:
            logits: Tensor = self.network(ids_BL, is_token_BL)
        else:
            logits = self.network(input_ids=ids_BL, attention_mask=is_token_BL.long(), use_cache=False).logits
        return logits


def open_language_model(
    path: str,
    *,
    tokenizer: str | None = None,
    device: str = "auto",
    report: Callable[[str], None] | None = None,
) -> LanguageModel:
    """Load the model that a path means, and its tokenizer.

    Args:
        path: a run directory, a checkpoint, the URL of one in a store, or a Hugging Face folder.
        tokenizer: "bytes" or the path of a tokenizer.json; None: that of the run or the folder.
        device: as torch names it, or "auto".
        report: called with a sentence for every damaged file that is passed over.

    Raises:
        ConfigurationError: there is no language model, or its tokenizer is not known.
        CheckpointError: it is damaged.
    """
    chosen, place = _device(device), place_of(path)
    if isinstance(place, Path) and not place.exists():
        raise ConfigurationError(
            f"{path} does not exist: give the directory of a run, such as outputs/quickstart, a checkpoint, or a "
            "Hugging Face folder on this machine (hf download ORG/NAME --local-dir NAME makes one)"
        )
    if isinstance(place, Path) and (place / _ADAPTER).is_file():
        raise ConfigurationError(
            f"{path} holds an adapter alone: give the run that has trained it, or export it with its model, by "
            "moe-ckpt export-hf without --adapter"
        )
    if isinstance(place, Path) and (place / CONFIG).is_file():
        model = _of_folder(place, tokenizer)
    else:
        model = _of_checkpoint(place, tokenizer, report)
    model.network.to(chosen).eval()
    return model


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"--device {name} cannot be used ({str(error).splitlines()[0]}): give cpu, cuda, or cuda:N"
        ) from None
    return device


# ---------------------------------------------------------------- our checkpoints


def _of_checkpoint(place: Place, given: str | None, report: Callable[[str], None] | None) -> LanguageModel:
    try:
        saved = open_saved(place, report=report)
    except ConfigurationError:
        if isinstance(place, Path) and (place / "config.yaml").is_file():
            raise ConfigurationError(
                f"{place} is a run without a checkpoint: train it to its end, or give another run"
            ) from None
        raise
    network = network_of(saved)
    if not isinstance(network, GPT) and not network.can_generate():
        raise ConfigurationError(
            f"{saved.path} holds a {type(network).__name__}, which is no language model: moe-train with task=validate "
            "measures it"
        )
    data = (config_of(str(saved.path)) or {}).get("data") or {}
    hyper_parameters = saved.values["hyper_parameters"]
    config, length = hyper_parameters["config"], data.get("context_length")
    if "huggingface" in hyper_parameters:
        named, config = config["pretrained"], trained_config(hyper_parameters)
        if data.get("tokenizer") == f"{named}/{TOKENIZER}":  # as recipes name it
            data = {**data, "tokenizer": f"{config['pretrained']}/{TOKENIZER}"}
    spec, trained = given, trained_tokenizer(saved.values)
    if spec is None and trained is None:
        named = tokenizer_origin(saved.values)
        is_here = named is not None and local_tokenizer(named).is_file()
        if not (data or is_here) and other_tokenizer(saved.values) is not None:
            raise ConfigurationError(
                f"{named}, the tokenizer of {saved.path}, is not here: give --tokenizer with the path of its "
                "tokenizer.json"
            )
        # The run's configuration may name it by a path of the folder where the run was trained.
        spec = _spec_of({**data, "tokenizer": named} if is_here else data, config, str(saved.path))
    tokenizer = tokenizer_from(trained) if spec is None else _named(spec)
    end = end_of_text(saved.values)
    if end is None:  # none, or not recorded
        end = end_of_documents(_sources(data), data.get("end_of_document"))
    ends = frozenset([] if end is None else [end])
    if not isinstance(network, GPT):
        _take_generation_defaults(network, local_folder(config["pretrained"]))
        if trained is not None or other_tokenizer(saved.values) is not None:
            defaults = network.generation_config
            defaults.eos_token_id = known_tokens(defaults.eos_token_id, tokenizer.added)
        ends |= _ends(network)
    return LanguageModel(
        name=str(saved.path),
        network=network,
        text=TrainedText(tokenizer, spec or ""),
        context_length=length if isinstance(length, int) else config["context_length"],
        ends=ends,
        data=data,
    )


def _named(spec: str) -> Tokenizer:
    if is_trained(spec):
        raise ConfigurationError(f"--tokenizer {spec} is to be trained: give bytes, or the path of a tokenizer.json")
    return load_tokenizer(spec)


def _spec_of(data: Mapping[str, Any], config: Mapping[str, Any], name: str) -> str:
    """Return the tokenizer that a run has named, or that its tokens or its base model have.

    Args:
        data, config: of the run, and of its model.
        name: for messages.

    Raises:
        ConfigurationError: there is none.
    """
    pretrained, spec = str(config.get("pretrained", "")), data.get("tokenizer")
    own = local_folder(pretrained) / TOKENIZER
    if "source" in data:
        sources = _sources(data)
        gone = next(
            (one.path for one in sources if one.path != STDLIB and not Path(one.path).expanduser().exists()), None
        )
        if spec is None and gone is not None and config.get("vocab_size", 0) > ByteTokenizer.vocab_size:
            raise ConfigurationError(
                f"the tokenizer of {name} is that of its tokens, and data.source={gone} is not there: start from the "
                "folder where it was trained, or give --tokenizer with the path of the tokenizer.json"
            )
        spec = tokenizer_of(sources, spec)
    if isinstance(spec, str) and not is_trained(spec):
        return spec
    if pretrained and own.is_file():
        return str(own)
    raise ConfigurationError(
        f"the tokenizer of {name} is not known, which its run's config.yaml would name: give --tokenizer bytes, or "
        "--tokenizer with the path of a tokenizer.json"
    )


def _sources(data: Mapping[str, Any]) -> Sequence[DataSource]:
    return sources_of(data["source"], str(data.get("text_field", "text"))) if "source" in data else ()


# ---------------------------------------------------------------- Hugging Face folders

_ADAPTER = "adapter_config.json"


def _of_folder(folder: Path, given: str | None) -> LanguageModel:
    network = _pretrained(folder)
    if given is None and not any((folder / name).is_file() for name in TOKENIZERS):  # transformers would make one
        raise ConfigurationError(
            f"{folder} holds no tokenizer: give --tokenizer bytes, or --tokenizer with the path of a tokenizer.json"
        )
    return LanguageModel(
        name=str(folder),
        network=network,
        text=PretrainedText(folder) if given is None else TrainedText(_named(given), given),
        context_length=min(_positions(network), _MOST_EVALUATED),
        ends=_ends(network),
        data={},
    )


def _pretrained(folder: Path) -> Any:
    """Load the model of a folder: safetensors only, no code of the folder, and every tensor of it must be there."""
    library = _quiet_transformers()
    try:
        network, report = library.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # each class has its own
        reason = str(error).strip().splitlines() or [repr(error)]
        raise ConfigurationError(f"transformers cannot load a language model from {folder}: {reason[0]}") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise CheckpointError(
            f"{folder} lacks {len(missing)} tensors of the model, such as {missing[0]!r}: it is incomplete"
        )
    return network


def _quiet_transformers() -> Any:
    """The package, which keeps its advice on options of a folder to itself."""
    library = transformers()
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def _positions(network: Any) -> int:
    """Most tokens of a sequence."""
    return int(getattr(network.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize)


def _ends(network: Any) -> frozenset[int]:
    """The tokens at which generation ends."""
    ends = network.generation_config.eos_token_id
    return frozenset([] if ends is None else ends if isinstance(ends, list) else [ends])


def _take_generation_defaults(network: Any, folder: Path) -> None:
    """Give a model built here what its original folder says of generation, as an export has it."""
    if not (folder / GENERATION).is_file():
        return
    try:
        network.generation_config = _quiet_transformers().GenerationConfig.from_pretrained(
            folder, local_files_only=True
        )
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{folder / GENERATION} cannot be read ({str(error).splitlines()[0]}): get it again, or remove it"
        ) from error
