// Plans of a tiny model by the places of its units, and the texts of their programs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "helm/program.h"
#include "tiny_model.h"

namespace helm::test {

// places: c or a for the embedding, every layer and the head, or for every unit of as many layers.
inline TinyShape placed(const std::string& places, int64_t layers) {
  TinyShape shape;
  shape.layers = layers;
  for (const char place : places) shape.devices.push_back(place == 'a' ? "accelerator" : "cpu");
  const bool by_layer = static_cast<int64_t>(places.size()) == layers + 2;
  int64_t there = 0;  // layers whose KV lies there
  for (size_t i = 1; i + 1 < places.size(); i += by_layer ? 1 : 2) there += places[i] == 'a';
  shape.pages = layers * 20;
  shape.accelerator_pages = there * 20;
  return shape;
}

// The same, whose layers on the CPU visit the accelerator in steps of eight tokens and more.
inline TinyShape placed_to_visit(const std::string& places, int64_t layers) {
  TinyShape shape = placed(places, layers);
  shape.visit_tokens = 8;
  shape.visit_pages = 40;
  return shape;
}

inline std::vector<std::string> texts(const TinyShape& shape) {
  return programs(Plan::from_json(tiny_model(shape).plan));
}

}  // namespace helm::test
