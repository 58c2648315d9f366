"""A tokenizer loads without transformers' list of all models, and equals transformers' own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.gateway.tiny_tokenizer import write_marked_tokenizer, write_tokenizer

ROOT = Path(__file__).parents[4]
TEXT = "the hello <|user|>world, café 12"
MESSAGES = [{"role": "user", "content": TEXT}]
MODELS = {
    "PreTrainedTokenizerFast": "llama",
    "TokenizersBackend": "qwen3",
    "Qwen2Tokenizer": "qwen2",
    "GPT2Tokenizer": "gpt2",
    "LlamaTokenizer": "llama",
    "PreTrainedTokenizer": "phi3",
    "": "qwen3",
}
"""Maps the class in tokenizer_config.json to the model type in config.json."""
UNKNOWN = "NoSuchTokenizer"
PROGRAM = """
import asyncio, json, sys
sys.modules["torch"] = None
from pathlib import Path
from services.gateway.adapters.tokenizer.hf_tokenizer import load_tokenizer

async def described(directory):
    tokenizer = load_tokenizer(Path(directory))
    (ids,) = await tokenizer.encode([given["text"]], add_special_tokens=True, max_tokens=1000)
    chat = tokenizer.has_chat_template and await tokenizer.render_chat(
        given["messages"],
        add_generation_prompt=True,
        continue_final_message=False,
        variables={},
    )
    return [ids, tokenizer.decode(ids, skip_special_tokens=False), chat, tokenizer.eos_token_id]

def package():
    return type(sys.modules["transformers"]).__module__

given = json.load(sys.stdin)
found = [asyncio.run(described(directory)) for directory in given["directories"]]
packages = [package()]
from transformers import AutoTokenizer, LlamaConfig
packages.append(package())
found += [asyncio.run(described(directory)) for directory in given["directories"]]
print(json.dumps([found, packages, AutoTokenizer.__name__, LlamaConfig().model_type]))
"""


def write_model(directory: Path, tokenizer_class: str, model_type: str) -> Path:
    write = write_marked_tokenizer if tokenizer_class == "LlamaTokenizer" else write_tokenizer
    path = write(directory) / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": tokenizer_class}
    if not tokenizer_class:
        del config["tokenizer_class"]
    path.write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


def described(directory: Path) -> list[Any]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(TEXT)["input_ids"]
    chat = tokenizer.chat_template is not None and tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    return [ids, tokenizer.decode(ids), chat, tokenizer.eos_token_id]


def run(directories: list[Path]) -> list[Any]:
    """Runs PROGRAM in a separate process. Returns its output."""
    given = {"text": TEXT, "messages": MESSAGES, "directories": [*map(str, directories)]}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(given),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_known_classes_need_no_list_of_models_which_comes_when_it_is_asked_for(
    tmp_path: Path,
) -> None:
    directories = [
        write_model(tmp_path / str(number), *of) for number, of in enumerate(MODELS.items())
    ]
    found, packages, *imported = run(directories)
    expected = [described(directory) for directory in directories]
    assert found == [*expected, *expected]
    assert packages == [
        "services.gateway.adapters.tokenizer.transformers_package",
        "transformers.utils.import_utils",
    ]
    assert imported == ["AutoTokenizer", "llama"]


def test_an_unknown_class_is_looked_for_in_the_list(tmp_path: Path) -> None:
    directory = write_model(tmp_path, UNKNOWN, "llama")
    found, packages, *_ = run([directory])
    assert found == 2 * [described(directory)]
    assert packages == 2 * ["transformers.utils.import_utils"]


def test_a_version_with_other_modules_is_imported_as_a_whole(tmp_path: Path) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("from transformers.elsewhere import AutoTokenizer\n")
    (package / "elsewhere.py").write_text("class AutoTokenizer: pass\n")
    program = (
        "from services.gateway.adapters.tokenizer import transformers_package\n"
        "found = transformers_package.import_auto_tokenizer()\n"
        "import transformers\n"
        "print(found.__module__, transformers.AutoTokenizer is found)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["transformers.elsewhere", "True"]
