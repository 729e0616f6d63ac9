"""Where a build finds and leaves its files.

Scripts of this folder run by path (``python build/plan.py``), so Python puts ``build/`` on the module path and not
the repository. Importing this module adds the repository, which makes ``contract`` importable from any of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "build" / "recipes"
OPTION_TABLES = ROOT / "build" / "trtllm"
ENGINES = ROOT / "engines"
MODEL_REPOSITORY = ROOT / "model_repository"

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
