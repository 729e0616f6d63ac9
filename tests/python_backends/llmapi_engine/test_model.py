import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_it_is_imported_without_openvino_and_without_tensorrt_llm():
    code = (
        "import sys; sys.modules['openvino'] = sys.modules['openvino_genai'] = None; "
        "sys.path.insert(0, 'tests/fakes'); import python_backends.llmapi_engine.model as m; "
        "assert 'tensorrt_llm' not in sys.modules; print(m.TritonPythonModel.load_timeout_s)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "3600\n"), done.stderr
