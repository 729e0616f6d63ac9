"""Render the Helm chart and check what it renders, without a cluster.

python -m cluster.chart             lint the chart, render and validate every case, compare with its rendered.yaml
python -m cluster.chart --update    the same, but write rendered.yaml

A case is a folder of ``cluster/helm/cases`` with values.yaml. Kubernetes' own kinds are held to their strict schemas,
custom resources to those of ``cluster/helm/schemas``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from contract.errors import EngineFailed, InvalidArgument

HELM_FILES = Path(__file__).resolve().parent / "helm"
CHART = HELM_FILES / "trident"
CASES = HELM_FILES / "cases"
HELM = Path(sys.executable).parent / "helm"  # put there by `make check`
KUBERNETES = ("1.30", "1.37")  # the oldest and the newest that documents are validated against
CUSTOM = {"ScaledObject", "InferencePool", "ServiceMonitor"}


def render(values: Path, release: str = "trident", namespace: str = "llm") -> str:
    """Return the documents of the chart for a values file, as YAML. Raises InvalidArgument: the chart refuses the
    values or the name; the text is helm's."""
    return _helm("template", release, str(CHART), "--namespace", namespace, "--values", str(values))


def documents(text: str) -> list[dict[str, Any]]:
    """Return the documents of a YAML text that have content."""
    return [document for document in yaml.safe_load_all(text) if document]


def problems(document: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with one document, each as ``kind/name: path: message``."""
    name = f"{document['kind']}/{document['metadata']['name']}"
    if document["kind"] in CUSTOM:
        for error in _validator(document["kind"]).iter_errors(document):
            yield f"{name}: {error.json_path}: {error.message}"
        return
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{name}: {error.json_path}: {error.message} (Kubernetes {version})"
        except kubernetes_validate.SchemaNotFoundError as error:
            yield f"{name}: {error.message}"


def main(argv: list[str]) -> int:
    found: list[str] = []
    try:
        if not HELM.is_file():
            raise EngineFailed(f"{HELM} is missing: `make check` installs it")
        _helm("lint", "--strict", "--quiet", str(CHART))
        for case in sorted(path.parent for path in CASES.glob("*/values.yaml")):
            text, golden = render(case / "values.yaml"), case / "rendered.yaml"
            found += [f"{case.name}: {each}" for document in documents(text) for each in problems(document)]
            if "--update" in argv:
                golden.write_text(text, "utf-8")
            elif not golden.is_file() or golden.read_text("utf-8") != text:
                advice = "if it should, `python -m cluster.chart --update`"
                found.append(f"{case.name}: not as {golden.name} says; {advice}")
            print(f"chart: {case.name}: {len(documents(text))} documents")
    except (EngineFailed, InvalidArgument) as error:
        found.append(str(error))
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


def _helm(*arguments: str) -> str:
    done = subprocess.run([str(HELM), *arguments], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise InvalidArgument("values", (done.stderr or done.stdout).strip())
    return done.stdout


@cache
def _validator(kind: str) -> Any:
    schema = json.loads((HELM_FILES / "schemas" / f"{kind.lower()}.json").read_text("utf-8"))
    return jsonschema.Draft202012Validator(schema)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
