#include "tiny_model.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <utility>

#include "tiny_cut.h"

namespace helm::test {
namespace {

class TinyModelBuilder {
 public:
  explicit TinyModelBuilder(const TinyShape& shape) : s_(shape), random_(17) {}

  TinyModel build() {
    plan_ = {{"format", "helm-plan"},
             {"version", Plan::kVersion},
             {"threads", s_.threads},
             {"logits", "logits"}};
    plan_["model"] = {{"architecture", "Tiny"}, {"fingerprint", "0"}, {"vocab_size", s_.vocab}};
    plan_["limits"] = {
        {"context", s_.context},
        {"step_tokens", s_.step_tokens},
        {"step_outputs", std::min(s_.step_tokens, std::max<int64_t>(8, s_.sequences))},
        {"sequences", s_.sequences}};
    plan_["kv"] = {{"dtype", s_.kv_dtype},    {"page_tokens", s_.page_tokens},
                   {"layers", kv_layers()},   {"kv_heads", s_.kv_heads},
                   {"head_dim", s_.head_dim}, {"blocks", s_.pages / s_.layers}};
    if (s_.window_blocks > 0) plan_["kv"]["window_blocks"] = s_.window_blocks;
    std::vector<float> inv_freq;
    for (int64_t i = 0; i < rotated_pairs(); ++i) {
      inv_freq.push_back(
          std::pow(100.0F, -2.0F * static_cast<float>(i) / static_cast<float>(s_.head_dim)));
    }
    plan_["rope"] = {{{"inv_freq", inv_freq}, {"attention_factor", 1.0}}};
    plan_["memory"] = nlohmann::json::object();
    plan_["devices"] = {{{"name", "cpu"}, {"kind", "cpu"}}};
    if (s_.cpu_bytes > 0) plan_["memory"]["cpu"] = memory(s_.cpu_bytes);
    if (!s_.devices.empty()) {
      plan_["devices"].push_back({{"name", "accelerator"}, {"kind", "accelerator"}});
      plan_["memory"]["accelerator"] = memory(s_.accelerator_bytes);
      plan_["schedule"] = {
          {"prefill", s_.visit_tokens > 0 ? "visit" : "compute"},
          {"visit_tokens", s_.visit_tokens},
          {"visit_pages", s_.visit_pages},
          {"visit_buffers", s_.visit_buffers},
          {"prefill_overlap", s_.overlap},
          {"decode_groups", s_.decode_groups},
          {"overflow", s_.overflow},
          {"watermark", s_.watermark},
          {"pages",
           {{"cpu", pages() - s_.accelerator_pages}, {"accelerator", s_.accelerator_pages}}}};
    }
    plan_["tensors"] = nlohmann::json::array();
    value("x", s_.hidden);
    value("h", s_.hidden);
    value("qkv", (s_.heads + 2 * s_.kv_heads) * s_.head_dim);
    value("attn", s_.heads * s_.head_dim);
    value("gate_up", 2 * s_.inter);
    value("act", s_.inter);
    value("x_out", s_.hidden, "outputs");
    value("h_out", s_.hidden, "outputs");
    value("attn_out", s_.heads * s_.head_dim, "outputs");
    value("gate_up_out", 2 * s_.inter, "outputs");
    value("act_out", s_.inter, "outputs");
    value("logits", s_.vocab, "outputs");
    if (s_.experts > 0) {
      for (const auto& [end, rows] : {std::pair{"", "tokens"}, {"_out", "outputs"}}) {
        value((std::string("router") + end).c_str(), s_.experts, rows);
        value((std::string("routes") + end).c_str(), 2 * chosen(), rows);
      }
    }
    matrix("embed", s_.vocab, s_.hidden, 1.0F);
    nlohmann::json embedding = {{"op", "embedding"}, {"table", "embed"}, {"out", "x"}};
    if (s_.varied) embedding["scale"] = 1.75;
    unit("embedding", "embedding", nlohmann::json::array({embedding}));
    for (int64_t layer = 0; layer < s_.layers; ++layer) block(layer);
    vector("norm", s_.hidden);
    auto head = nlohmann::json::array(
        {norm("x_out", "h_out", "norm", s_.hidden), linear("h_out", "logits", {"embed"}, false)});
    if (s_.varied) {
      head[0]["weight_plus"] = 0.5;
      head.push_back(activation("softcap", "logits", "logits", s_.vocab, 9));
    }
    unit("head", "head", head);
    if (!s_.cuts.empty() || s_.cut_rows > 0) cut_units(&plan_, s_);
    add_slices();
    model_.plan = plan_.dump();
    return std::move(model_);
  }

 private:
  static nlohmann::json memory(int64_t bytes) {
    return {{"weights_bytes", bytes}, {"kv_bytes", 0},      {"activations_bytes", 0},
            {"workspace_bytes", 0},   {"staging_bytes", 0}, {"reserve_bytes", 0}};
  }
  int64_t pages() const { return s_.pages / s_.layers * s_.layers; }
  nlohmann::json kv_layers() const {
    auto layers = nlohmann::json::array();
    for (int64_t layer = 0; layer < s_.layers; ++layer) {
      layers.push_back({{"layer", layer}, {"kv_head", 0}, {"kv_heads", s_.kv_heads}});
      if (s_.window > 0) layers.back()["window"] = s_.window;
    }
    return layers;
  }
  bool visits(const std::string& tensor) const {
    return std::ranges::any_of(s_.visiting, [&](const std::string& some) {
      return tensor.find(some) != std::string::npos;
    });
  }
  // The tensors that units of a device name.
  std::set<nlohmann::json> names_on(const std::string& device) const {
    std::set<nlohmann::json> names;
    const auto add = [&](const nlohmann::json& op) {
      for (const char* key :
           {"table", "weight", "bias", "sinks", "gate", "up", "down", "gate_bias", "down_bias"}) {
        if (op.contains(key) && op[key].is_string()) names.insert(op[key]);
      }
    };
    for (const nlohmann::json& unit : plan_["units"]) {
      if (unit["device"] != device) continue;
      for (const nlohmann::json& op : unit["ops"]) {
        add(op);
        if (!op.contains("parts")) continue;
        for (const nlohmann::json& part : op["parts"]) add(part);
      }
    }
    return names;
  }
  // What each device holds of them, the CPU also what visits the accelerator.
  void add_slices() {
    plan_["slices"] = nlohmann::json::array();
    for (const std::string device : {"cpu", "accelerator"}) {
      std::set<nlohmann::json> names = names_on(device);
      for (const nlohmann::json& name : names_on("accelerator")) {
        if (!visits(name)) continue;
        if (device == "cpu") names.insert(name);
        if (device != "cpu") names.erase(name);
      }
      for (const nlohmann::json& tensor : plan_["tensors"]) {
        if (names.count(tensor["name"]) == 0) continue;
        plan_["slices"].push_back(
            {{"tensor", tensor["name"]},
             {"device", device},
             {"format", tensor["shape"].size() == 2 ? s_.weight_dtype : "f32"},
             {"access", "resident"}});
      }
    }
  }
  int64_t rotated_pairs() const { return s_.varied ? s_.head_dim / 4 : s_.head_dim / 2; }
  void value(const char* name, int64_t width, const char* rows = "tokens") {
    plan_["values"].push_back({{"name", name}, {"width", width}, {"rows", rows}});
  }
  void tensor(const std::string& name, std::vector<int64_t> shape, float mean, float scale) {
    std::normal_distribution<float> normal(mean, scale);
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    auto data = std::make_shared<std::vector<float>>();
    for (int64_t i = 0; i < count; ++i) data->push_back(normal(random_));
    plan_["tensors"].push_back(
        {{"name", name}, {"shape", shape}, {"source", nullptr}, {"part", nullptr}});
    model_.tensors[name] = {std::move(shape), std::move(data)};
  }
  std::string matrix(const std::string& name, int64_t rows, int64_t cols, float scale) {
    tensor(name, {rows, cols}, 0, scale);
    return name;
  }
  std::string vector(const std::string& name, int64_t size) {
    tensor(name, {size}, 1, 0.2F);
    return name;
  }
  static nlohmann::json norm(const std::string& in, const std::string& out,
                             const std::string& weight, int64_t size, int64_t offset = 0,
                             int64_t groups = 1) {
    return {{"op", "norm"},     {"kind", "rms"},        {"in", in},         {"in_offset", offset},
            {"out", out},       {"out_offset", offset}, {"groups", groups}, {"size", size},
            {"weight", weight}, {"bias", nullptr},      {"eps", 1e-5}};
  }
  static nlohmann::json activation(const char* kind, const std::string& in, const std::string& out,
                                   int64_t size, double factor) {
    return {{"op", "activation"}, {"kind", kind}, {"gated", false},  {"in", in},
            {"out", out},         {"size", size}, {"factor", factor}};
  }
  static nlohmann::json select(const std::string& in) {
    return {{"op", "select"}, {"in", in}, {"out", in + "_out"}};
  }
  static nlohmann::json linear(const std::string& in, const std::string& out,
                               const std::vector<std::string>& weights, bool accumulate,
                               const std::vector<std::string>& biases = {}) {
    nlohmann::json parts;
    for (size_t i = 0; i < weights.size(); ++i) {
      parts.push_back({{"weight", weights[i]}, {"bias", nullptr}});
      if (!biases.empty()) parts.back()["bias"] = biases[i];
    }
    return {
        {"op", "linear"}, {"in", in}, {"out", out}, {"parts", parts}, {"accumulate", accumulate}};
  }
  void unit(const std::string& name, const std::string& kind, const nlohmann::json& ops,
            const nlohmann::json& layer = nullptr) {
    size_t index = plan_["units"].size();
    const bool whole = std::ssize(s_.devices) == s_.layers + 2;  // layers
    if (whole) index = (index + 1) / 2;
    const std::string device = s_.devices.empty() ? "cpu" : s_.devices.at(index);
    plan_["units"].push_back(
        {{"name", name}, {"kind", kind}, {"layer", layer}, {"device", device}, {"ops", ops}});
  }
  void block(int64_t layer) {
    const std::string p = "block." + std::to_string(layer) + ".";
    const int64_t q = s_.heads * s_.head_dim;
    const int64_t kv = s_.kv_heads * s_.head_dim;
    const float scale = 0.3F;
    const std::vector<std::string> qkv = {matrix(p + "q", q, s_.hidden, scale),
                                          matrix(p + "k", kv, s_.hidden, scale),
                                          matrix(p + "v", kv, s_.hidden, scale)};
    const std::string o = matrix(p + "o", s_.hidden, q, scale);
    std::vector<std::string> gate_up;
    std::string down;
    if (s_.experts == 0) {
      gate_up = {matrix(p + "gate", s_.inter, s_.hidden, scale),
                 matrix(p + "up", s_.inter, s_.hidden, scale)};
      down = matrix(p + "down", s_.hidden, s_.inter, scale);
    }
    std::vector<std::string> biases;
    if (s_.qkv_bias) {
      biases = {vector(p + "q_bias", q), vector(p + "k_bias", kv), vector(p + "v_bias", kv)};
    }
    auto ops = nlohmann::json::array({norm("x", "h", vector(p + "norm1", s_.hidden), s_.hidden),
                                      linear("h", "qkv", qkv, false, biases)});
    if (s_.qk_norm) {
      const int64_t n = s_.head_dim;
      ops.push_back(norm("qkv", "qkv", vector(p + "q_norm", n), n, 0, s_.heads));
      ops.push_back(norm("qkv", "qkv", vector(p + "k_norm", n), n, q, s_.kv_heads));
    }
    ops.push_back({{"op", "rope"},
                   {"value", "qkv"},
                   {"offset", 0},
                   {"heads", s_.heads + s_.kv_heads},
                   {"head_dim", s_.head_dim},
                   {"rotary", 2 * rotated_pairs()},
                   {"table", 0}});
    if (s_.varied) ops.back()["pairs"] = "neighbours";
    ops.push_back({{"op", "attention"},
                   {"in", "qkv"},
                   {"q_offset", 0},
                   {"k_offset", q},
                   {"v_offset", q + kv},
                   {"out", "attn"},
                   {"layer", layer},
                   {"heads", s_.heads},
                   {"kv_heads", s_.kv_heads},
                   {"head_dim", s_.head_dim},
                   {"scale", 0.3},
                   {"window", s_.window}});
    if (s_.softcap > 0) ops.back()["softcap"] = s_.softcap;
    if (in_turn()) ops.back()["sinks"] = vector(p + "sinks", s_.heads);
    const bool last = layer + 1 == s_.layers;
    if (last) ops.insert(ops.end(), {select("x"), select("attn")});
    const auto rows = [last](const std::string& value) { return last ? value + "_out" : value; };
    ops.push_back(linear(rows("attn"), rows(s_.varied ? "h" : "x"), {o}, !s_.varied));
    if (s_.varied) {
      ops.push_back(norm(rows("h"), rows("x"), vector(p + "norm_behind", s_.hidden), s_.hidden));
      ops.back()["accumulate"] = true;
      ops.back()["weight_plus"] = 1;
    }
    const std::string name = "layer." + std::to_string(layer);
    unit(name + ".attention", "attention", ops, layer);
    if (s_.experts > 0) return mixture(p, layer, last);
    nlohmann::json rest = {norm(rows("x"), rows("h"), vector(p + "norm2", s_.hidden), s_.hidden),
                           linear(rows("h"), rows("gate_up"), gate_up, false),
                           {{"op", "activation"},
                            {"kind", "silu"},
                            {"gated", true},
                            {"in", rows("gate_up")},
                            {"out", rows("act")},
                            {"size", s_.inter}},
                           linear(rows("act"), rows(s_.varied ? "h" : "x"), {down}, !s_.varied)};
    if (s_.varied) {
      rest.push_back(activation("scale", rows("h"), rows("x"), s_.hidden, 0.625));
      rest.back()["accumulate"] = true;
    }
    unit(name + ".mlp", "mlp", rest, layer);
  }

  int64_t chosen() const { return std::max<int64_t>(1, s_.experts / 2); }
  bool in_turn() const { return s_.experts_layout == "neighbours"; }

  void mixture(const std::string& p, int64_t layer, bool last) {
    const auto rows = [last](const std::string& value) { return last ? value + "_out" : value; };
    const int64_t count = s_.experts * s_.inter;
    const bool apart = s_.experts_layout == "apart";
    nlohmann::json route = {{"op", "route"},         {"in", rows("router")},
                            {"out", rows("routes")}, {"chosen", chosen()},
                            {"score", s_.score},     {"normalise", s_.score == "softmax"},
                            {"scale", 1.5}};
    if (s_.score == "sigmoid") route["bias"] = vector(p + "choice", s_.experts);
    nlohmann::json experts = {
        {"op", "experts"},          {"in", rows("h")},
        {"routes", rows("routes")}, {"out", rows("x")},
        {"experts", s_.experts},    {"chosen", chosen()},
        {"size", s_.inter},         {"layout", s_.experts_layout},
        {"gate", p + "gate"},       {"up", nullptr},
        {"down", p + "down"},       {"activation", in_turn() ? "swiglu_limit" : "silu"}};
    matrix(p + "router", s_.experts, s_.hidden, 0.3F);
    matrix(p + "gate_of_experts", count * (apart ? 1 : 2), s_.hidden, 0.3F);
    experts["gate"] = p + "gate_of_experts";
    if (apart) experts["up"] = matrix(p + "up_of_experts", count, s_.hidden, 0.3F);
    experts["down"] = matrix(p + "down_of_experts", s_.experts * s_.hidden, s_.inter, 0.3F);
    if (in_turn()) {
      experts["factor"] = 1.25;
      experts["gate_bias"] = vector(p + "gate_bias", 2 * count);
      experts["down_bias"] = vector(p + "down_bias", s_.experts * s_.hidden);
    }
    unit("layer." + std::to_string(layer) + ".mlp", "mlp",
         {norm(rows("x"), rows("h"), vector(p + "norm2", s_.hidden), s_.hidden),
          linear(rows("h"), rows("router"), {p + "router"}, false), route, experts},
         layer);
  }

  TinyShape s_;
  std::mt19937 random_;
  nlohmann::json plan_;
  TinyModel model_;
};

}  // namespace

EngineOptions TinyModel::options() const {
  EngineOptions options;
  for (const auto& [name, tensor] : tensors) {
    TensorView view;
    view.data = tensor.data->data();
    view.owner = tensor.data;
    view.shape = tensor.shape;
    options.tensors.emplace(name, view);
  }
  return options;
}

TinyModel TinyModel::with(const std::string& path, const std::string& value) const {
  nlohmann::json changed = nlohmann::json::parse(plan);
  changed[nlohmann::json::json_pointer(path)] = nlohmann::json::parse(value);
  return {changed.dump(), tensors};
}

TinyModel TinyModel::with_slices(const std::string& device, const std::string& key,
                                 const std::string& from, const std::string& to) const {
  nlohmann::json changed = nlohmann::json::parse(plan);
  for (nlohmann::json& slice : changed["slices"]) {
    if (slice["device"] == device && slice[key] == from) slice[key] = to;
  }
  return {changed.dump(), tensors};
}

TinyShape large_shape(int threads, const char* dtype) {
  return {.vocab = 1021,
          .hidden = 512,
          .inter = 1024,
          .layers = 1,
          .heads = 8,
          .kv_heads = 2,
          .head_dim = 64,
          .weight_dtype = dtype,
          .threads = threads};
}

TinyShape cut_shape() {
  TinyShape shape{.inter = 72, .heads = 6, .kv_heads = 3, .head_dim = 16};
  shape.qk_norm = shape.qkv_bias = true;
  shape.cuts = {{1, 32}, {2, 64, false}};
  shape.cut_rows = 30;
  shape.cut_on_cpu = true;
  return shape;
}

TinyModel tiny_model(const TinyShape& shape) {
  const TinyModel model = TinyModelBuilder(shape).build();
  return shape.far_position_steps > 0 ? model.with("/predictor", step_times(shape)) : model;
}

std::vector<float> data_of(const TinyModel& model, const TensorSpec& tensor) {
  if (!tensor.part) return *model.tensors.at(tensor.name).data;
  const TinyTensor& whole = model.tensors.at(tensor.part->tensor);
  const int64_t width = whole.shape.size() == 2 ? whole.shape[1] : 1;
  std::vector<float> data;
  for (int64_t r = tensor.part->row; r < tensor.part->row + tensor.rows(); ++r) {
    const auto row = whole.data->begin() + r * width + tensor.part->col;
    data.insert(data.end(), row, row + tensor.cols());
  }
  return data;
}

}  // namespace helm::test
