"""The manifests for Kubernetes agree with each other, with the command `serve`, and with keygen."""

import argparse
import re
import shutil
from pathlib import Path

import pytest
import yaml

from seqpar.commands import serve
from seqpar.servers.pool.discovery import parse
from seqpar.servers.transport.addresses import check_address, check_keys, host_and_port
from seqpar.servers.transport.authority import add_client, generate, revoke, rotate
from seqpar.servers.transport.certificates import ClientIdentity, ServerIdentity
from seqpar.servers.wire.limits import ServerDeadlines

FOLDER = Path(__file__).parents[3] / "examples/kubernetes"
KUSTOMIZATION = (FOLDER / "kustomization.yaml").read_text()
MANIFESTS = [
    x
    for name in ("servers", "trainer")
    for x in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())
]
BY_KIND = {x["kind"]: x for x in MANIFESTS}
PODS = {kind: BY_KIND[kind]["spec"]["template"] for kind in ("Deployment", "Job")}
(SERVER,) = PODS["Deployment"]["spec"]["containers"]
PORTS = {x["name"]: x["containerPort"] for x in SERVER["ports"]}


def test_manifests_are_of_known_kinds():
    found = {x["kind"]: x["apiVersion"] for x in MANIFESTS}
    assert found == {
        "Deployment": "apps/v1",
        "Service": "v1",
        "NetworkPolicy": "networking.k8s.io/v1",
        "Job": "batch/v1",
    }
    assert yaml.safe_load(KUSTOMIZATION)["resources"] == ["servers.yaml"]
    assert {x.name for x in FOLDER.glob("*.yaml")} == {
        "servers.yaml", "trainer.yaml", "kustomization.yaml",
    }  # fmt: skip


def arguments():
    """The arguments of the servers, as `serve` reads them."""
    assert SERVER["command"] == ["python", "-m", "seqpar", "serve"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    return parser.parse_args(SERVER["args"])


def test_ports_are_those_that_serve_opens():
    found = arguments()
    check_keys("bind", check_address("bind", found.bind), found.keys)
    health, metrics = (serve._place(x, getattr(found, x)) for x in ("health", "metrics"))
    ports = {"attention": host_and_port(found.bind)[1], "health": health[1], "metrics": metrics[1]}
    assert ports == PORTS
    assert health[0] == metrics[0] == "0.0.0.0"  # the kubelet asks from outside the pod


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_ask_the_health_port(probe):
    assert SERVER[probe]["grpc"] == {"port": PORTS["health"]}  # of the service "": the server
    assert SERVER[probe]["timeoutSeconds"] <= SERVER[probe]["periodSeconds"]


def test_names_and_labels_agree():
    labels = PODS["Deployment"]["metadata"]["labels"]
    service, policy = BY_KIND["Service"], BY_KIND["NetworkPolicy"]["spec"]
    assert BY_KIND["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == policy["podSelector"]["matchLabels"] == labels
    (port,) = service["spec"]["ports"]
    assert port["port"] == PORTS[port["targetPort"]] == PORTS["attention"]
    assert service["spec"]["clusterIP"] == "None"  # the name stands for all servers
    trainers, monitoring = policy["ingress"]
    (who,) = trainers["from"]
    assert who["podSelector"]["matchLabels"] == PODS["Job"]["metadata"]["labels"]
    reached = [port["port"] for rule in (trainers, monitoring) for port in rule["ports"]]
    assert reached == ["attention", "metrics"] and set(reached) < set(PORTS)


def test_the_trainer_is_told_the_services_address():
    address, keys = re.search(
        r'connect\("(\S+)", keys="(\S+)"\)', (FOLDER / "trainer.yaml").read_text()
    ).groups()
    service = BY_KIND["Service"]
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert parse(address) == [f"dns://{name}:{port}"]
    (mount,) = PODS["Job"]["spec"]["containers"][0]["volumeMounts"]
    assert mount == {"name": "keys", "mountPath": keys, "readOnly": True}


def test_a_pod_has_time_to_drain():
    given = PODS["Deployment"]["spec"]["terminationGracePeriodSeconds"]
    assert given > 2 * ServerDeadlines().drain + 1


@pytest.mark.parametrize("kind", PODS)
def test_pods_have_few_rights(kind):
    spec = PODS[kind]["spec"]
    (container,) = spec["containers"]
    rights = spec["securityContext"]
    assert (
        rights["runAsNonRoot"] and rights["runAsUser"] and not spec["automountServiceAccountToken"]
    )
    assert rights["fsGroup"] == rights["runAsGroup"]  # which may read the private key
    own = container["securityContext"]
    assert own["capabilities"] == {"drop": ["ALL"]} and own["allowPrivilegeEscalation"] is False
    assert {"requests", "limits"} == container["resources"].keys()


def test_the_servers_mounts_are_read_only_but_one():
    mounts = {x["name"]: x for x in SERVER["volumeMounts"]}
    assert set(mounts) == {x["name"] for x in PODS["Deployment"]["spec"]["volumes"]}
    assert mounts["keys"]["readOnly"] and mounts["keys"]["mountPath"] == str(arguments().keys)
    assert SERVER["securityContext"]["readOnlyRootFilesystem"]
    assert {"name": "HOME", "value": mounts["scratch"]["mountPath"]} in SERVER["env"]


def secrets(keys, text=KUSTOMIZATION):
    """The secrets that kustomize makes from a folder of keys: bytes by name and key."""
    found = {}
    for generator in yaml.safe_load(text)["secretGenerator"]:
        data = found[generator["name"]] = {}
        for line in generator.get("files", []):
            key, _, path = line.rpartition("=")
            data[key or Path(path).name] = (keys.parent / path).read_bytes()
        for line in generator.get("literals", []):
            key, _, value = line.partition("=")
            data[key] = value.encode()
    return found


def mount(kind, secret, folder):
    """Mount a pod's keys as a kubelet does, as links to a folder of files; return the folder."""
    (volume,) = (x for x in PODS[kind]["spec"]["volumes"] if x["name"] == "keys")
    shutil.rmtree(folder, ignore_errors=True)
    version = folder / "..2026_01_01"
    version.mkdir(parents=True)
    folder.chmod(0o1777)
    for source in (x["secret"] for x in volume["projected"]["sources"]):
        for item in source["items"]:
            path = version / item["path"]
            if item["key"] not in secret[source["name"]]:
                assert source["optional"], f"{item['key']} is missing"
                continue
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(secret[source["name"]][item["key"]])
            path.chmod(volume["projected"]["defaultMode"])
    (folder / "..data").symlink_to(version.name)
    for name in {path.relative_to(version).parts[0] for path in version.rglob("*")}:
        (folder / name).symlink_to(f"..data/{name}")
    return folder


def pem(folder):
    """The client's certificate in a folder, as gRPC gives it to a server."""
    return (folder / "client.crt").read_bytes()


def test_what_keygen_makes_is_mounted_as_folders_of_keys(tmp_path):
    generate(keys := tmp_path / "keys")
    made = secrets(keys)
    server = ServerIdentity(mount("Deployment", made, tmp_path / "server"))
    client = mount("Job", made, tmp_path / "client")
    assert server.look() == [] and ClientIdentity(client).faults() == []
    assert server.name_of(pem(client)) == "client"


def test_rotations_and_revocations_reach_the_mounted_folder(tmp_path):
    """The lines of the kustomization that are comments show how."""
    generate(keys := tmp_path / "keys")
    add_client(keys, "alice")
    old, alice = pem(keys), pem(keys / "clients" / "alice")
    server = ServerIdentity(mount("Deployment", secrets(keys), tmp_path / "server"))
    assert server.name_of(alice) == "alice"
    revoke(keys, "alice")
    rotate(keys)
    text, count = re.subn(r"^( *)# (- |files: )", r"\1\2", KUSTOMIZATION, flags=re.MULTILINE)
    assert count == 2
    made = secrets(keys, text)
    mount("Deployment", made, tmp_path / "server")
    assert server.look() == []
    client = mount("Job", made, tmp_path / "client")
    assert server.name_of(alice) is None
    assert server.name_of(old) == server.name_of(pem(client)) == "client" and old != pem(client)
