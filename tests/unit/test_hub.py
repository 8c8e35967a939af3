"""Models of the Hub by name, from a server on this machine: what is downloaded, what is cached, what is refused."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from moe_lightning.data.chat_formats import chat_format
from moe_lightning.data.tokenizer import check_tokenizer, load_tokenizer, tokenizer_content
from moe_lightning.errors import ConfigurationError
from moe_lightning.hub import (
    hub_name,
    local_folder,
    missing_weights,
    model_folder,
    origin,
    tokenizer_file,
    weights_folder,
)
from tests.commands import moe_train
from tests.huggingface_models import inputs_for, logits_of, make_checkpoint
from tests.programs import exit_code
from tests.unit.test_generate import write_tokenizer

hub = pytest.importorskip("huggingface_hub")
COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@dataclass
class Served:
    """Server of the few addresses that a download asks for.

    Attributes:
        folder: with a folder ORG/NAME for each model; `gated/` are gated ones.
        address: of the server.
        files: that were sent, in order.
        requests: number of requests of any kind.
    """

    folder: Path
    address: str = ""
    files: list[str] = field(default_factory=list)
    requests: int = 0


def handler(served: Served) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Write nothing."""

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            served.requests += 1
            path = self.path.partition("?")[0]
            api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/(revision|tree)/(.+))?", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            repository = (api or file)[1]  # type: ignore[index]
            home = served.folder / repository
            if not home.is_dir():
                return self.answer(404, X_Error_Code="RepoNotFound")
            if file is not None:
                if repository.startswith("gated/"):
                    return self.answer(401, X_Error_Code="GatedRepo")
                content = (home / file[3]).read_bytes()
                if self.command == "GET":
                    served.files.append(f"{repository}/{file[3]}")
                digest = sha1(content).hexdigest()
                return self.answer(200, content, ETag=f'"{digest}"', X_Repo_Commit=file[2])
            revision = COMMITS.get(api[4] or "main", api[4])  # type: ignore[index]
            if revision not in COMMITS.values():
                return self.answer(404, X_Error_Code="RevisionNotFound")
            if api[3] == "tree":  # type: ignore[index]
                files = [path for path in sorted(home.rglob("*")) if path.is_file()]
                tree = [
                    {"type": "file", "path": str(path.relative_to(home)), "size": path.stat().st_size, "oid": "0" * 40}
                    for path in files
                ]
                return self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
            told = {"id": repository, "modelId": repository, "sha": revision, "siblings": []}
            return self.answer(200, json.dumps(told).encode(), Content_Type="application/json")

        do_HEAD = do_GET

    return Handler


def ask(address: str, cache: Path, set_: Callable[..., object] = setattr) -> None:
    """Make this process download from the server, into the cache."""
    for name, value in {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(cache),
    }.items():
        set_(hub.constants, name, value)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A Hub with an empty cache before it."""
    found = Served(tmp_path / "hub")
    found.folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(found))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found.address = f"http://127.0.0.1:{server.server_address[1]}"
    ask(found.address, tmp_path / "cache", monkeypatch.setattr)
    monkeypatch.chdir(tmp_path)
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def publish(served: Served, name: str, **options: Any) -> Any:
    """Put a tiny OLMoE in several files on the server, beside what must not be downloaded."""
    folder = served.folder / name
    model = make_checkpoint("olmoe", folder, vocab_size=300, **options)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="60KB")
    write_tokenizer(folder)
    (folder / "original").mkdir()
    for file in ("pytorch_model.bin", "modeling_olmoe.py", "consolidated.safetensors", "original/model.safetensors"):
        (folder / file).write_text("no")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    return model


def test_names() -> None:
    names = {"a/b": "a/b", "a/b-1.c@v1": "a/b-1.c@v1", "a/b/tokenizer.json": "a/b", "a/b@x/y/tokenizer.json": "a/b@x/y"}
    assert {given: str(hub_name(given)) for given in names} == names
    for path in (
        "tok/tokenizer.json",
        "dir/my.json",
        "",
        "a",
        "gpt2",
        "/a/b",
        "./a/b",
        "../a/b",
        "~/a",
        "a/b/c",
        "a/b@",
        "https://a/b",
        "tests/unit",
    ):
        assert hub_name(path) is None, path


def test_a_path_is_understood_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert origin("org/tiny@v1") == "org/tiny@v1"
    assert origin("~/tiny") == str(tmp_path / "tiny")
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert origin("org/tiny") == str(tmp_path / "org" / "tiny")


def test_a_model_is_downloaded_once_and_without_pickles(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    theirs, inputs = publish(served, "org/tiny"), inputs_for("olmoe")
    assert missing_weights("org/tiny")
    assert local_folder("org/tiny") == Path("org/tiny")
    module = HuggingFaceModule({"pretrained": "org/tiny", "context_length": 16})
    assert not [file for file in served.files if file.endswith(".safetensors")], "a wrong model costs no download"
    module.configure_model()
    torch.testing.assert_close(module.eval()(inputs), logits_of(theirs, inputs), rtol=0, atol=1e-5)
    sent = {file.removeprefix("org/tiny/") for file in served.files}
    assert len(sent) == len(served.files)
    weights = {file for file in sent if file.endswith(".safetensors")}
    assert len(weights) > 2
    assert sent - weights >= {"config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"}
    assert "additional_chat_templates/tool_use.jinja" in sent
    assert all(re.fullmatch(r"model-\d+-of-\d+\.safetensors|[\w.]+\.json|[\w/]+\.jinja", file) for file in sent)
    assert not missing_weights("org/tiny")

    before = served.requests
    again = HuggingFaceModule({"pretrained": "org/tiny", "context_length": 16})
    again.configure_model()
    assert tokenizer_file("org/tiny") == local_folder("org/tiny") / "tokenizer.json"
    assert served.requests == before, "the cache is enough"
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    assert weights_folder("org/tiny") == local_folder("org/tiny")
    assert module.hparams["config"]["pretrained"] == "org/tiny"


def test_one_file_comes_before_an_old_index(served: Served) -> None:
    """transformers saves one file beside the index and the files of an earlier one, and loads that one."""
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    publish(served, "org/tiny")
    theirs = make_checkpoint("olmoe", served.folder / "new", vocab_size=300, initializer_range=0.2)
    (served.folder / "new" / "model.safetensors").rename(served.folder / "org" / "tiny" / "model.safetensors")
    module = HuggingFaceModule({"pretrained": "org/tiny", "context_length": 16})
    assert missing_weights("org/tiny")
    module.configure_model()
    inputs = inputs_for("olmoe")
    torch.testing.assert_close(module.eval()(inputs), logits_of(theirs, inputs), rtol=0, atol=1e-5)
    assert [file for file in served.files if file.endswith(".safetensors")] == ["org/tiny/model.safetensors"]
    assert not missing_weights("org/tiny")


def test_a_revision_and_a_folder_of_the_same_name(served: Served) -> None:
    publish(served, "org/tiny")
    assert model_folder("org/tiny@v1").name == COMMITS["v1"]
    assert model_folder(f"org/tiny@{COMMITS['v1']}") == model_folder("org/tiny@v1")
    assert model_folder("org/tiny").name == COMMITS["main"]
    before = served.requests
    Path("org/tiny").mkdir(parents=True)
    assert weights_folder("org/tiny") == Path("org/tiny")
    assert served.requests == before


def test_a_mistyped_path_of_a_tokenizer_is_not_asked_for(served: Served) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer='tok/tokenizer.json' does not exist; give the path of"):
        check_tokenizer("tok/tokenizer.json")
    assert served.requests == 0


@pytest.mark.parametrize("spec", ["org/tiny", "org/tiny@v1", "org/tiny/tokenizer.json", "org/tiny@v1/tokenizer.json"])
def test_a_tokenizer_by_the_name_of_its_model(spec: str, served: Served) -> None:
    publish(served, "org/tiny")
    path = served.folder / "org" / "tiny" / "tokenizer.json"
    assert tokenizer_content(spec) == tokenizer_content(str(path))
    assert load_tokenizer(spec).encode("hello")[0].tolist() == load_tokenizer(str(path)).encode("hello")[0].tolist()
    assert type(chat_format(spec, "<e>")) is type(chat_format(str(path), "<e>"))
    assert not [file for file in served.files if file.endswith(".safetensors")]


REFUSED = {
    "org/none": "is neither on this machine nor a model of the Hub that you may read: check name and revision",
    "org/tiny@v9": "is neither on this machine nor a model of the Hub that you may read: check name and revision",
    "gated/tiny": r"is gated: accept its terms on http://.*/gated/tiny, and run hf auth login",
    "org/a..b": "is neither on this machine nor a model of the Hub that you may read: check name and revision",
    "org/files": "has no config.json, so it is not a model of transformers: give another",
    "org/pickled": "has no safetensors, and pickles are not read: save it with save_pretrained",
    "org/cunning": "lists files in its model.safetensors.index.json that are not safetensors: name another",
    "org/damaged": "has a damaged model.safetensors.index.json .*: name another revision",
}


def test_what_cannot_be_downloaded_is_one_sentence(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    from moe_lightning.cli.train import main as moe_train

    publish(served, "org/tiny")
    config = (served.folder / "org" / "tiny" / "config.json").read_text()
    indexes = {"cunning": '{"weight_map": {"a": "../../x.bin"}}', "damaged": "[]", "pickled": None, "bert": None}
    for each, index in indexes.items():
        folder = served.folder / "org" / each
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "bert"}' if each == "bert" else config)
        (folder / "pytorch_model.bin").write_text("no")
        if index is not None:
            (folder / "model.safetensors.index.json").write_text(index)
    for each in ("org/files/data.csv", "gated/tiny/config.json"):
        (served.folder / each).parent.mkdir(parents=True)
        (served.folder / each).write_text("1")
    for name, sentence in REFUSED.items():
        with pytest.raises(ConfigurationError, match=f"^pretrained={name} {sentence}[^\n]*$"):
            weights_folder(name)
    with pytest.raises(ConfigurationError, match=r"^tokenizer=org/pickled: org/pickled has no tokenizer.json: "):
        check_tokenizer("org/pickled")
    Path("chat.jsonl").write_text('{"prompt": "1", "response": "2"}\n' * 9)
    command = ["recipes=olmoe_finetune", "data.path=chat.jsonl", "model.context_length=64", "ranks=1", "run_dir=out"]
    told = {
        "nowhere": r"pretrained=nowhere does not exist: give the folder .* or ORG/NAME of a model on the Hub",
        "org/none": f"pretrained=org/none {REFUSED['org/none']}",
        "org/bert": r"model_type='bert' of .* is not known: use one of mixtral",
    }
    for name, sentence in told.items():
        assert exit_code(moe_train, [*command, f"model.pretrained={name}"]) == 2
        lines = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
        assert len(lines) == 1
        assert re.search(sentence, lines[0])
    assert not [file for file in served.files if not file.endswith((".json", ".jinja"))], "weights of a wrong model"


def test_without_a_network(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    cure = r"where there is a network run hf download org/tiny --revision v1 --local-dir tiny, and give {}$"
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigurationError,
        match=r"HF_HUB_OFFLINE forbids downloads: set HF_HUB_OFFLINE=0, or " + cure.format("pretrained=tiny"),
    ):
        model_folder("org/tiny@v1")
    assert served.requests == 0
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ConfigurationError, match=r"the Hub cannot be reached \(.*\): " + cure.format("tokenizer=tiny/tokenizer.json")
    ):
        check_tokenizer("org/tiny@v1")


def test_without_a_network_the_required_files_are_enough(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs leave out files that they do not need, such as the generation defaults, and list them all."""
    publish(served, "org/tiny")
    own = [path.name for path in (served.folder / "org" / "tiny").iterdir() if path.suffix in (".json", ".safetensors")]
    hub.snapshot_download("org/tiny", allow_patterns=[name for name in own if name != "generation_config.json"])
    assert "generation_config.json" in own
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    folder = weights_folder("org/tiny")
    assert folder == local_folder("org/tiny") == model_folder("org/tiny") == tokenizer_file("org/tiny").parent
    assert not (folder / "generation_config.json").exists()
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    assert (model_folder("org/tiny") / "generation_config.json").is_file(), "with a network it is completed"


@pytest.mark.slow
def test_a_run_and_its_exports_name_the_model(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks train adapters; the exported adapter names model and revision as peft does, also without the cache."""
    from moe_lightning.cli.huggingface import export_checkpoint

    publish(served, "org/tiny", max_position_embeddings=128)
    Path("chat.jsonl").write_text('{"prompt": "1", "response": "2"}\n' * 40)
    command = (
        "recipes=olmoe_finetune model.pretrained=org/tiny@v1 data.path=chat.jsonl ranks=2 trainer.max_steps=2 "
        "model.context_length=64 data.global_batch_size=4 '+model.adapter={rank: 2}' accelerator=cpu run_dir=out "
        "data.end_token=END logger=csv"
    )
    done = moe_train(tmp_path, *shlex.split(command), before=partial(ask, served.address, tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    for cache, said in (
        ("cache", ""),
        ("empty", f"moe-ckpt: {tmp_path}/empty_alone has no tokenizer, since org/tiny@v1"),
    ):
        monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / cache))
        alone = tmp_path / f"{cache}_alone"
        capsys.readouterr()
        export_checkpoint(tmp_path / "out" / "checkpoints", alone, adapter_alone=True)
        assert capsys.readouterr().err.startswith(said)
        described = json.loads((alone / "adapter_config.json").read_text())
        assert (described["base_model_name_or_path"], described["revision"]) == ("org/tiny", "v1")
    assert "\nbase_model: org/tiny\n" in (tmp_path / "cache_alone" / "README.md").read_text()
    assert len(served.files) == len(set(served.files)), "the launcher downloads once for both ranks"
