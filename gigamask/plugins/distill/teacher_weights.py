"""The weights of a teacher that a user names. Imports no torch."""

from gigamask.errors import GigamaskError
from gigamask.models.weight_paths import check_weights_exist


def check_teacher(teacher: str) -> None:
    """Check that there are weights of a teacher.

    Raises:
        GigamaskError: None are named, or they do not exist.
    """
    if not teacher:
        raise GigamaskError(
            "--teacher is required: the weights of a SAM, such as sam_vit_h_4b8939.pth or a "
            "run folder"
        )
    check_weights_exist(teacher, f"--teacher {teacher}")
