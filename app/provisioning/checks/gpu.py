"""Judge NVIDIA's driver: explain why a card in the PC is not one of its GPUs."""

from __future__ import annotations

from app.provisioning.check_row import CheckedNode, CheckRow, make_row
from app.provisioning.repairs import keep_driver_loaded, offer_driver
from app.text import count_of

INSTALL = "sudo ubuntu-drivers install, then restart that PC"
RESTART = "Restart that PC"


def judge_driver(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Compare the cards on the bus with the GPUs that the driver lists, and explain missing
    ones.
    """
    driver, facts = node.examination.driver, node.facts
    if facts.wsl is not None:
        return _judge_windows_driver(node)
    if driver.num_cards is None and not facts.gpus:
        text = "the PCI bus could not be read, so a card without a driver would not be seen"
        fix = "Run there: lspci | grep -i nvidia"
        return (make_row("driver", node.name, "unknown", text, fix),)
    found = len(facts.gpus) + len(facts.mig_gpus)
    cards = max(driver.num_cards or 0, found)
    if not cards:
        return ()
    evidence = (
        f"{count_of(cards, 'card')}, {count_of(found, 'GPU')}; module "
        f"{driver.module_version or 'not loaded'}, library {driver.library_version or 'not found'}"
        + (f"; nvidia-smi: {driver.smi_message}" if driver.smi_message else "")
    )
    if found == cards:
        told = next((gpu.driver for gpu in facts.gpus), None)
        version = driver.module_version or told or "version not known"
        text = f"the driver ({version}) shows {count_of(found, 'GPU')} of {cards}"
        return (make_row("driver", node.name, "pass", text, "", evidence=evidence),)
    reason, fix = _explain_missing(node)
    text = f"{count_of(cards - found, 'NVIDIA card')} cannot be used: {reason}"
    repair = offer_driver(facts) if fix == INSTALL else None
    return (make_row("driver", node.name, "fail", text, fix, repair, evidence=evidence),)


def judge_persistence(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that the driver stays loaded between programs; no row in WSL and other systems."""
    kept = node.examination.driver.persistence
    if kept is None or node.facts.wsl is not None:
        return ()
    if kept:
        return (make_row("persistence", node.name, "pass", "the driver stays loaded"),)
    text = "the driver unloads itself when no program uses a GPU, so the next one starts slowly"
    fix = "sudo nvidia-smi -pm 1"
    return (make_row("persistence", node.name, "warn", text, fix, keep_driver_loaded()),)


def _explain_missing(node: CheckedNode) -> tuple[str, str]:
    """Return the reason why a card is not a GPU, and the fix."""
    driver = node.examination.driver
    # In the order in which one cause hides the next.
    if driver.nouveau:
        return "the free driver nouveau holds it, which cannot compute", INSTALL
    if driver.library_version is None and not driver.is_loaded:
        return "there is no NVIDIA driver", INSTALL
    if not driver.is_loaded:
        return (
            "the driver is installed, but its kernel module is not loaded (after an update of the "
            "kernel, or because Secure Boot refuses it)",
            "Run there: sudo dkms autoinstall && sudo modprobe nvidia; mokutil --sb-state says "
            "if Secure Boot is on",
        )
    if driver.was_updated:
        return (
            f"the driver was updated to {driver.library_version} while {driver.module_version} is "
            "still loaded",
            RESTART,
        )
    if driver.devices_open is False:
        return (
            "this user may not open the device files of the driver",
            "sudo usermod -aG video,render $USER, then log in again",
        )
    said = driver.smi_message or node.facts.gpu_problem
    reason = f"the driver says: {said}" if said else "the driver does not list it"
    return reason, "Run there: nvidia-smi; sudo dmesg | grep -i nvrm names a card that has failed"


def _judge_windows_driver(node: CheckedNode) -> tuple[CheckRow, ...]:
    driver = node.examination.driver
    if node.facts.gpus:
        text = "the driver of Windows shows its GPUs to WSL"
        return (make_row("driver", node.name, "pass", text),)
    if driver.dxg is None:
        fix = "Run there: ls /dev/dxg"
        text = "it is not known whether Windows shows a GPU to WSL"
        return (make_row("driver", node.name, "unknown", text, fix),)
    if driver.dxg:
        text = "Windows offers a GPU to WSL, but no NVIDIA GPU is listed"
        fix = "Install the newest NVIDIA driver on Windows, then run there: wsl --update"
        return (
            make_row("driver", node.name, "fail", text, fix, evidence=driver.smi_message or ""),
        )
    text = "Windows offers no GPU to WSL; trains on its CPU"
    fix = "If that PC has one, install the NVIDIA driver on Windows, then wsl --update"
    return (make_row("driver", node.name, "warn", text, fix, evidence="/dev/dxg is not there"),)
