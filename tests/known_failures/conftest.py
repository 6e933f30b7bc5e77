"""Known failures are played with the labs of the other folders' tests: a router in miniature, a gateway
between fake engines, tokenizers of every habit.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parents[1]


def _conftest_of(folder: str) -> ModuleType:
    name = f"{folder}_lab_of_known_failures"
    spec = importlib.util.spec_from_file_location(name, TESTS / folder / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path[:0] = [str(TESTS / "known_failures"), str(TESTS / "routing")]

_gateway = _conftest_of("gateway")
pytest_pyfunc_call = _gateway.pytest_pyfunc_call
lab, behaviours = _gateway.lab, _gateway.behaviours

_prompts = _conftest_of("prompts")
checkpoint, transformers_tokenizer = _prompts.checkpoint, _prompts.transformers_tokenizer
