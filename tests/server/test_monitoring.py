"""The dashboard and the alerts: they ask for figures that there are, and Prometheus can read them."""

import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import yaml

from outpace import Engine
from outpace.server.app import create_app
from outpace.serving.service import Service
from tests.server.conftest import LIMITS, Client
from tests.support import until

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD = json.loads((DEPLOY / "dashboard.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
NAME = re.compile(r"outpace:\w+")
KEY = "a-key"


def filled(text, window="10s"):
    """A query as Grafana sends it, with all of its variables filled in."""
    for name, value in (("__rate_interval", window), ("__range", "1h"), ("model", ".*"), ("drafter", ".*")):
        text = text.replace(f"${name}", value)
    assert "$" not in text
    return text


def queries():
    """(panel, query) of all panels."""
    return [(panel["title"], filled(target["expr"])) for panel in PANELS for target in panel["targets"]]


def test_every_figure_that_is_asked_for_is_there(engine):
    with Service(Engine(engine.target, "none"), drafters=("prompt_lookup",)) as service:
        client = Client(create_app(service, name="tiny", limits=LIMITS))
        client.complete("ab ab", temperature=0, max_tokens=48, ignore_eos=True)
        lines = client.get("/metrics").text.splitlines()
    there = {found for line in lines if (found := re.split(r"[{ ]", line)[0]).startswith("outpace:")}
    asked = [query for _, query in queries()] + [rule["expr"] for rule in RULES]
    asked += [one["definition"] for one in BOARD["templating"]["list"] if one["type"] == "query"]
    for text in asked:
        names = NAME.findall(text)
        assert (names or "up{" in text) and set(names) <= there, text


def test_panels_stand_side_by_side_and_are_explained():
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    taken = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    assert all(panel["description"] and panel["targets"] for panel in PANELS)


def test_everything_reads_from_the_source_that_is_provisioned():
    said = yaml.safe_load((DEPLOY / "grafana.yaml").read_text())
    (source,), (provider,) = said["datasources"], said["providers"]
    (variable,) = [one for one in BOARD["templating"]["list"] if one["type"] == "datasource"]
    assert source["type"] == variable["query"] == "prometheus" and source["url"] == "http://prometheus:9090"
    used = {target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]}
    assert used == {"${datasource}"}
    mounted = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["grafana"]["volumes"]
    assert any(one.startswith(f"./dashboard.json:{provider['options']['path']}/") for one in mounted)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_can_read_all_of_it(tmp_path):
    rules = [{"record": f"q{i}", "expr": query} for i, (_, query) in enumerate(queries())]
    asked = tmp_path / "queries.yaml"

    def check(rules):
        asked.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
        command = ["promtool", "check", "rules", str(asked), str(DEPLOY / "alerts.yaml")]
        return subprocess.run(command, capture_output=True, text=True)

    done = check(rules)
    assert done.returncode == 0, done.stdout + done.stderr
    assert check([*rules, {"record": "wrong", "expr": "rate(outpace:x_total"}]).returncode != 0
    command = ["promtool", "check", "config", "--syntax-only", str(DEPLOY / "prometheus.yaml")]
    assert subprocess.run(command, capture_output=True).returncode == 0


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def running(*command):
    """A process, ended afterwards."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def answers(url, **headers):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, headers=headers).status_code == 200
    return False


@contextlib.contextmanager
def monitored(folder, *arguments):
    """A server that asks for a key, and Prometheus that reads its figures by the files of this repository."""
    port, other = free_port(), free_port()
    (folder / "api-key").write_text(KEY)
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    config["global"]["scrape_interval"] = "1s"
    (scrape,) = config["scrape_configs"]
    scrape["authorization"]["credentials_file"] = str(folder / "api-key")
    scrape["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(DEPLOY / "alerts.yaml", folder)
    serve = [sys.executable, "-m", "outpace.cli.main", "serve", "--port", str(port), *arguments]
    prometheus = [
        "prometheus",
        f"--config.file={folder}/prometheus.yaml",
        f"--storage.tsdb.path={folder}/data",
    ]
    with (
        running(*serve, "--api-key-file", str(folder / "api-key")),
        running(*prometheus, f"--web.listen-address=127.0.0.1:{other}"),
    ):
        until(lambda: answers(f"http://127.0.0.1:{port}/health"), 60)
        until(lambda: answers(f"http://127.0.0.1:{other}/-/ready"), 60)
        yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{other}"


@contextlib.contextmanager
def loaded(url, drafters):
    """Requests one after the other, of all drafters and of none, meanwhile."""
    ended = threading.Event()

    def ask():
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as client:
            for count in range(10**6):
                drafter = drafters[count % len(drafters)]
                body = {"prompt": f"{count} ab ab ab", "max_tokens": 24, "ignore_eos": True, "temperature": 0}
                client.post("/v1/completions", json={**body, "speculation": {"drafter": drafter}})
                if ended.is_set():
                    return

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)


def series(prometheus, query):
    """Labels and values that are numbers, of a query now."""
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", answer
    found = [(one["metric"], float(one["value"][1])) for one in answer["data"]["result"]]
    return [(labels, value) for labels, value in found if math.isfinite(value)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_every_panel_has_series_under_load(tmp_path):
    drafters = ("prompt_lookup", "suffix", "none")
    started = [word for name in drafters[:2] for word in ("-d", name)]
    with monitored(tmp_path, "--model", "tiny", *started) as (url, prometheus), loaded(url, drafters):
        for panel, query in queries():
            until(lambda query=query: series(prometheus, query), 40)
            assert all(value >= 0 for _, value in series(prometheus, query)), panel
        (speed,) = [query for panel, query in queries() if panel.startswith("Speed-up")]
        by_drafter = {labels["drafter"]: value for labels, value in series(prometheus, speed)}
        assert by_drafter.keys() == set(drafters) and by_drafter["none"] == pytest.approx(1.0)
        health = httpx.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
        assert [rule["health"] for group in health for rule in group["rules"]] == ["ok"] * len(RULES)
        assert series(prometheus, 'ALERTS{alertstate="firing"}') == []
