"""Answer questions about Trident from its own pages, and say how good the answers are: ``make rag``.

python -m server --engine smollm2,demo,minilm --free-ports -- python -m examples.rag [QUESTION...]
python -m examples.rag --url http://localhost:9000/v1 --models smollm2 --encoder minilm      # a gateway that runs
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import openai

from examples.rag import evaluate
from examples.rag.index import Index
from examples.rag.orchestrator import Answer, Orchestrator
from examples.rag.tools import Tables

HERE = Path(__file__).resolve().parent
DOCS, CACHE = HERE.parents[1] / "docs", HERE.parents[1] / ".cache" / "rag" / "index.npz"
ANSWERED = 6  # of the labelled questions


@contextlib.asynccontextmanager
async def gateway() -> AsyncIterator[str]:
    """Start a gateway in front of the servers that started this program; yields its URL, and ends it."""
    more = dict.fromkeys(("HTTP_PORT", "GRPC_PORT", "MONITORING_PORT"), "0")
    more |= {"PROMPTS": str(HERE / "prompts"), "LOG_LEVEL": "error"}
    environment = {**os.environ, **{f"TRIDENT_GATEWAY_{name}": value for name, value in more.items()}}
    command, pipe = (sys.executable, "-m", "gateway"), asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=pipe)
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        if not line.startswith("http "):
            raise SystemExit("error: the gateway did not start")
        yield f"http://{line.split()[1]}/v1"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


def shown(answer: Answer) -> str:
    """Return an answer for a terminal."""
    lines = [f"\n> {answer.question}", "", answer.checked.text or "(nothing)", ""]
    cited = [(number, answer.sources[number - 1]) for number in answer.checked.cited]
    lines += [f"  [{number}] docs/{source.page}, {source.heading}" for number, source in cited]
    branches = ", ".join(f"{one.name} {one.outcome} {one.seconds:.1f} s" for one in answer.branches)
    tokens, grounded = sum(branch.tokens for branch in answer.branches), answer.checked.grounded
    lines.append(f"  {'partial; ' if answer.partial else ''}{answer.model or 'the sources themselves'}; {branches}")
    lines.append(f"  {answer.seconds:.1f} s, {tokens} tokens, grounded {grounded:.0%}, trace {answer.trace_id}")
    return "\n".join(lines)


async def main(arguments: argparse.Namespace) -> None:
    async with contextlib.AsyncExitStack() as stack:
        url = arguments.url or await stack.enter_async_context(gateway())
        api_key = os.environ.get("OPENAI_API_KEY", "none")
        client = await stack.enter_async_context(openai.AsyncOpenAI(base_url=url, api_key=api_key))
        for _ in range(60):  # seconds until the gateway has found its replicas
            with contextlib.suppress(openai.APIError):
                await client.embeddings.create(model=arguments.encoder, input="ready?")
                break
            await asyncio.sleep(1.0)
        index = await Index.build(client, arguments.encoder, DOCS, CACHE)
        index.reranker = arguments.reranker
        print(f"{len(index.passages)} passages; {url}")
        delays = {name: float(seconds) for name, _, seconds in (one.partition("=") for one in arguments.delay)}
        orchestrator = Orchestrator(client, index, Tables(DOCS), arguments.models.split(","), delays)
        labels = [json.loads(line) for line in (HERE / "questions.jsonl").open()]
        answers = []
        for question in arguments.question or [label["question"] for label in labels[:ANSWERED]]:
            answers.append(await orchestrator.answer(question, arguments.seconds, arguments.tokens))
            print(shown(answers[-1]))
        if not arguments.question:
            print("\n" + await evaluate.retrieval(client, index, labels))
            print(evaluate.summary(answers, labels))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="*", help="else labelled ones, with an evaluation")
    parser.add_argument("--url", help="of a gateway up to /v1, with examples/rag/prompts; else one is started")
    parser.add_argument("--models", default="smollm2,demo", help="asked at once; the best supported answer is taken")
    parser.add_argument("--encoder", default="minilm", help="model of embeddings, and of rerank too")
    parser.add_argument("--reranker", default="", help="model of rerank, such as a cross-encoder")
    parser.add_argument("--seconds", type=float, default=30.0, help="deadline of a question")
    parser.add_argument("--tokens", type=int, default=1200, help="of prompts and outputs of a question")
    parser.add_argument("--delay", action="append", default=[], metavar="BRANCH=SECONDS", help='such as "retrieval=9"')
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(parser.parse_args()))
