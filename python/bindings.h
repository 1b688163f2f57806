// What each file adds to the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace helm {

void bind_machine(nanobind::module_& m);
void bind_probe(nanobind::module_& m);
void bind_device_probe(nanobind::module_& m);

}  // namespace helm
