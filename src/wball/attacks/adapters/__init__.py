"""This library's attacks behind the interfaces of others.

==========================================  ====================================  ==================
module                                      what it gives                         extra to install
==========================================  ====================================  ==================
:mod:`wball.attacks.adapters.art`           an ``EvasionAttack`` of ART           ``wball[art]``
:mod:`wball.attacks.adapters.foolbox`       an attack for foolbox models          ``wball[foolbox]``
:mod:`wball.attacks.adapters.onnx`          ONNX files as PyTorch modules         ``wball[onnx]``
:mod:`wball.attacks.adapters.torchattacks`  ``atk(images, labels)``               none
==========================================  ====================================  ==================

Each is imported when it is first used; the others' libraries need not be installed.
"""

from wball.lazy import submodules

__getattr__ = submodules(__name__)
