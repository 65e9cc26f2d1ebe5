"""Checks of Python, TensorFlow, Keras, TensorBoard and the repairs."""

import re
import sys
from collections.abc import Mapping

from packaging.version import Version

from tfgpu.compat import versions
from tfgpu.compat.versions import INSTALL, KERAS, TENSORFLOW, Support
from tfgpu.doctor.check import Check


def python(facts: Mapping[str, dict]) -> Check:
    found = facts["python"]
    if "error" in found:
        fix = f"Run `{sys.executable} -c 'import tfgpu'` and fix its error."
        return Check("Python", "problem", found["error"], fix)
    text = f"{found['version']} ({found['executable']})"
    if tuple(map(int, found["version"].split(".")[:2])) < (3, 11):
        return Check("Python", "problem", text, "Install Python 3.11 or newer, and create a new .venv with it.")
    return Check("Python", "ok", text)


def tensorflow(facts: Mapping[str, dict]) -> Check:
    return _package(TENSORFLOW, facts["tensorflow"])


def _package(support: Support, found: dict) -> Check:
    title = support.title
    if "error" in found:
        is_missing = re.search(rf"No module named '{support.package}'$", found["error"])
        text = "not installed" if is_missing else f"cannot be imported: {found['error']}"
        return Check(title, "problem", text, command=INSTALL if is_missing else f"{INSTALL} --force-reinstall")
    how = support.compare(found["version"])
    if how == "supported":
        return Check(title, "ok", found["version"])
    status = "problem" if how == "older" else "warning"
    return Check(title, status, support.describe(found["version"]), command=INSTALL)


def several_tensorflows(facts: Mapping[str, dict]) -> Check:
    """Several TensorFlow packages, which install into the same folder."""
    found = facts["packages"].get("tensorflows", [])
    names = [each.partition(" ")[0] for each in found]
    if len(found) < 2:
        return Check("TensorFlow packages", "ok", ", ".join(found) or "none installed by pip")
    text = f"{', '.join(found)}: they share one folder and overwrite each other's files"
    return Check("TensorFlow packages", "problem", text, command=f"pip uninstall -y {' '.join(names)}; {INSTALL}")


def triton(facts: Mapping[str, dict]) -> Check | None:
    """Triton, which PyTorch installs: imported after a TensorFlow that shares its symbols, it crashes."""
    version = facts["packages"].get("triton")
    if not version:
        return None
    if not facts["packages"].get("shares_symbols") or Version(version) < Version("3.7"):
        return Check("Triton", "ok", version)
    text = f"{version}: a process that imports it after TensorFlow crashes; PyTorch, transformers and PEFT import it"
    return Check("Triton", "warning", text, "Begin scripts that use PyTorch beside TensorFlow with `import triton`.")


def keras(facts: Mapping[str, dict], environ: Mapping[str, str]) -> Check:
    found = facts["keras"]
    # A backend that is not installed causes an import error that names it.
    absent = re.search(r"No module named '(jax|torch|openvino)'", found.get("error", ""))
    backend = absent[1] if absent else found.get("backend", "tensorflow")
    if backend == "tensorflow":
        return _package(KERAS, found)
    command = "export KERAS_BACKEND=tensorflow"
    file = "" if "KERAS_BACKEND" in environ else '  (or set "backend": "tensorflow" in ~/.keras/keras.json)'
    return Check("Keras", "problem", f"its backend is {backend}, not TensorFlow", command + file, command)


def legacy_keras(facts: Mapping[str, dict], environ: Mapping[str, str]) -> Check:
    wanted = environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    installed = facts["packages"].get("tf-keras")
    if wanted:
        text = "TF_USE_LEGACY_KERAS makes tf.keras the old Keras 2, which is incompatible with Keras 3"
        return Check("Legacy Keras", "problem", text, command="unset TF_USE_LEGACY_KERAS")
    if installed:
        text = f"tf-keras {installed} is installed: its models are incompatible with Keras 3"
        fix = "pip uninstall -y tf-keras  (unless something imports tf_keras)"
        return Check("Legacy Keras", "warning", text, fix, "pip uninstall -y tf-keras")
    return Check("Legacy Keras", "ok", "not in use")


def build(facts: Mapping[str, dict]) -> Check:
    found = facts["tensorflow"]
    if "error" in found:
        return Check("TensorFlow build", "problem", "unknown: TensorFlow cannot be imported", command=INSTALL)
    about = found["build"]
    if not about.get("is_cuda_build"):
        return Check("TensorFlow build", "ok", "for CPUs")
    capabilities = ", ".join(about.get("cuda_compute_capabilities", []))
    text = f"CUDA {about.get('cuda_version', '?')}, cuDNN {about.get('cudnn_version', '?')} ({capabilities})"
    return Check("TensorFlow build", "ok", text)


def tensorboard(facts: Mapping[str, dict]) -> Check:
    version = facts["packages"].get("tensorboard")
    if not version:
        text = "not installed: logs cannot be written"
        return Check("TensorBoard", "problem", text, command="pip install 'tensorboard>=2.17'")
    return Check("TensorBoard", "ok", version)


def repairs(facts: Mapping[str, dict], environ: Mapping[str, str]) -> list[Check]:
    found = facts["repairs"]
    if "error" in found:
        if "no answer" in found["error"]:
            fix = "Run `tfgpu doctor` again when the machine is less busy."
            return [Check("Keras repairs", "warning", found["error"], fix)]
        if "problem" in (tensorflow(facts).status, keras(facts, environ).status):
            text = "unknown: TensorFlow or Keras cannot be used"
            return [Check("Keras repairs", "problem", text, "Fix TensorFlow and Keras first.")]
        return [Check("Keras repairs", "problem", found["error"], command=INSTALL)]
    is_off = environ.get("TFGPU_REPAIR", "1") == "0"
    checks = []
    for name, is_needed in found.items():
        title = f"Keras repair {name}"
        if is_needed is None:
            fix = "Run `tfgpu doctor` again; if this remains, report it with `tfgpu doctor --bundle`."
            checks.append(Check(title, "warning", "its probe gave no answer; the repair is installed", fix))
        elif not is_needed:
            checks.append(Check(title, "ok", "not needed here: its probe finds no fault"))
        elif is_off:
            text = "needed here, but TFGPU_REPAIR=0 disables it"
            checks.append(Check(title, "warning", text, command="unset TFGPU_REPAIR"))
        else:
            checks.append(Check(title, "ok", "needed here; tfgpu.strategy() installs it"))
    return checks


def patches(facts: Mapping[str, dict]) -> list[Check]:
    """Whether tfgpu was tested with the source of every function that it wraps."""
    found, title = facts["patches"], "Patches"
    if "error" in found:
        return []  # `repairs` reports it
    in_force, on_use = found["in force"], [[*each, "wrapped on use"] for each in found["on use"]]
    details = [dict(zip(("target", "by", "source"), each, strict=True)) for each in (*in_force, *on_use)]
    changed = [f"{target} (by {by})" for target, by, source in in_force if source == "changed"]
    functions = {target for target, *_ in in_force}
    text = f"{len(in_force)} patches of {len(functions)} functions of Keras and TensorFlow"
    text += f", {len(on_use)} more on use (--json lists them)"
    if not changed:
        return [Check(title, "ok", f"{text}; all sources were tested", details=details)]
    text = f"{text}; the source of {', '.join(changed)} was not tested"
    fix = f"Compare a short run with one device, or use a tested version: {versions.tried()}."
    return [Check(title, "warning", text, fix, details=details)]
