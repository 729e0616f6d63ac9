"""The process that translates and compiles guides. A guide that crashes or hangs it ends no stream."""

from __future__ import annotations

import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from python_backends.ensemble.worker_messages import Ready
from python_backends.grammar.measured_compiler import MeasuredCompiler

_NICE = 5  # as the engine: what carries its tokens goes first
# Bytes for guides. With 262,144 ids they took up to 0.3 GiB; the stacks of a large machine's threads count too.
_MOST_MEMORY = 4 * 1024**3


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the server, which ends this process
    os.nice(_NICE)
    connection = Connection(int(sys.argv[1]))
    try:
        check = _compiler(Path(sys.argv[2])).check
        limit_memory()
        connection.send(Ready())
        while True:
            connection.send(check(connection.recv()))
    except (EOFError, ConnectionError):
        return  # the engine model closed the connection


def limit_memory() -> None:
    """Let this process end, before the machine lacks memory, when guides take more than _MOST_MEMORY."""
    used_kb = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0])
    limit = used_kb * 1024 + _MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _compiler(vocabulary: Path) -> MeasuredCompiler:
    """vocabulary: a folder GRAMMAR_CHECKER or a file TOKENIZER_INFO. A machine has only one of the two libraries."""
    if vocabulary.is_dir():
        from python_backends.grammar.pipeline import GrammarPipeline

        return GrammarPipeline(vocabulary)
    from python_backends.grammar.xgrammar_compiler import XGrammarCompiler

    return XGrammarCompiler(vocabulary)


if __name__ == "__main__":
    main()
