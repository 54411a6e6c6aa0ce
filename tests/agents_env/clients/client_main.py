"""Holds conversations with a client library in the agents' environment: ``python client_main.py MODULE``.

Each line of stdin is a JSON object {"mode", "url", "key"}; each line of stdout is the program's result, as {"answer":
text} or {"error": text}. The program imports only the module of this library, and nothing of Relax.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback


def main() -> None:
    out = os.fdopen(os.dup(1), "w")  # from now on, prints of libraries go to stderr
    os.dup2(2, 1)
    module = importlib.import_module(sys.argv[1])
    print(json.dumps({"ready": sorted(module.MODES)}), file=out, flush=True)
    modes = module.MODES | {"engine": getattr(module, "ENGINE_MODE", None)}
    for line in sys.stdin:
        asked = json.loads(line)
        os.environ |= {
            "OPENAI_BASE_URL": f"{asked['url']}/v1",
            "OPENAI_API_KEY": asked["key"],
            "ANTHROPIC_BASE_URL": asked["url"],
            "ANTHROPIC_API_KEY": asked["key"],
        }
        try:
            said = {"answer": modes[asked["mode"]]()}
        except Exception:  # the test shows the library's error
            said = {"error": traceback.format_exc()}
        print(json.dumps(said), file=out, flush=True)


if __name__ == "__main__":
    main()
