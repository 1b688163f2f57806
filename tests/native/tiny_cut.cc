#include "tiny_cut.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

namespace helm::test {
namespace {

using nlohmann::json;

struct Range {
  int64_t begin, end;

  std::string text() const { return std::to_string(begin) + ":" + std::to_string(end); }
  int64_t size() const { return end - begin; }
};

class Cutter {
 public:
  Cutter(json* plan, const TinyShape& shape) : plan_(*plan), s_(shape) {}

  void run() {
    const json units = std::exchange(plan_["units"], json::array());
    for (const json& unit : units) {
      const auto layer = unit["layer"].is_null() ? size_t{0} : unit["layer"].get<size_t>();
      const TinyCut cut = layer < s_.cuts.size() ? s_.cuts[layer] : TinyCut{};
      if (unit["kind"] == "attention") {
        attention(unit, cut);
      } else if (unit["kind"] == "mlp" && cut.inter > 0) {
        mlp(unit, cut);
      } else if (unit["kind"] == "head" && s_.cut_rows > 0) {
        head(unit);
      } else {
        plan_["units"].push_back(unit);
      }
    }
    name_tensors();
    place_pages();
  }

 private:
  enum Part { kBegin, kGuest, kHome, kEnd };

  // The parts in their order: what the CPU is not to wait for comes before what it computes.
  void put(const json& unit, bool cpu_home, const std::vector<json>& ops) {
    const auto device = [&](bool cpu) { return cpu || s_.cut_on_cpu ? "cpu" : "accelerator"; };
    const std::string name = unit["name"];
    const auto part = [&](Part which, const char* suffix) {
      json one = unit;
      one["name"] = name + suffix;
      one["device"] = device((which == kGuest) != cpu_home);
      one["ops"] = ops[which];
      plan_["units"].push_back(one);
    };
    part(kBegin, ".begin");
    if (cpu_home) part(kGuest, ".guest");
    part(kHome, ".home");
    if (!cpu_home) part(kGuest, ".guest");
    part(kEnd, ".end");
  }

  void attention(json unit, const TinyCut& cut) {
    if (cut.heads == 0) {
      for (json& op : unit["ops"]) {
        if (op["op"] == "attention") op["layer"] = entry(unit, {0, s_.kv_heads}, unit["device"]);
      }
      plan_["units"].push_back(unit);
      return;
    }
    const Range cpu{0, cut.heads}, other{cut.heads, s_.kv_heads};
    std::vector<json> ops(4, json::array());
    ops[kBegin].push_back(unit["ops"][0]);
    std::string x;
    const auto heads = [&](Range range, bool on_cpu) {
      const bool home = on_cpu == cut.cpu_home;
      json& to = ops[home ? kHome : kGuest];
      const json layer = entry(unit, range, on_cpu || s_.cut_on_cpu ? "cpu" : "accelerator");
      for (size_t i = 1; i < unit["ops"].size(); ++i) {
        json op = unit["ops"][i];
        if (op["op"] == "select" && op["in"] == "x" && !home) continue;
        if (op["op"] == "attention") op["layer"] = layer;
        to.push_back(of_heads(op, range, home));
        if (home && op["op"] == "linear") x = op["out"];
      }
    };
    heads(cpu, true);
    heads(other, false);
    ops[kEnd].push_back(sum(x));
    put(unit, cut.cpu_home, ops);
  }

  json of_heads(json op, Range range, bool home) {
    const int64_t group = s_.heads / s_.kv_heads, n = s_.head_dim;
    const Range queries{range.begin * group, range.end * group};
    const int64_t q = queries.size() * n, kv = range.size() * n;
    const auto renamed = [&](const char* key) {
      if (!op.contains(key) || !op[key].is_string()) return;
      const std::string name = op[key];
      if (name == "qkv") op[key] = value(name, range, q + 2 * kv);
      if (name == "attn" || name == "attn_out") op[key] = value(name, range, q);
    };
    for (const char* key : {"in", "out", "value"}) renamed(key);
    if (op["op"] == "norm") {
      const bool keys = op["in_offset"] != 0;
      op["in_offset"] = op["out_offset"] = keys ? q : 0;
      op["groups"] = keys ? range.size() : queries.size();
    } else if (op["op"] == "rope") {
      op["heads"] = queries.size() + range.size();
    } else if (op["op"] == "attention") {
      op["heads"] = queries.size();
      op["kv_heads"] = range.size();
      op["k_offset"] = q;
      op["v_offset"] = q + kv;
    } else if (op["op"] == "linear" && op["parts"].size() == 3) {
      const Range rows[] = {{queries.begin * n, queries.end * n},
                            {range.begin * n, range.end * n},
                            {range.begin * n, range.end * n}};
      for (size_t i = 0; i < 3; ++i) {
        for (const char* key : {"weight", "bias"}) {
          json& tensor = op["parts"][i][key];
          if (!tensor.is_null()) tensor = rows_of(tensor, rows[i]);
        }
      }
    } else if (op["op"] == "linear") {
      columns(&op, {queries.begin * n, queries.end * n}, home);
    }
    return op;
  }

  void mlp(const json& unit, const TinyCut& cut) {
    std::vector<json> ops(4, json::array());
    ops[kBegin].push_back(unit["ops"][0]);
    const auto elements = [&](Range range, bool home) {
      json up = unit["ops"][1], act = unit["ops"][2], down = unit["ops"][3];
      for (json& part : up["parts"]) part["weight"] = rows_of(part["weight"], range);
      up["out"] = act["in"] = value(up["out"], range, 2 * range.size());
      act["out"] = down["in"] = value(act["out"], range, range.size());
      act["size"] = range.size();
      columns(&down, range, home);
      ops[home ? kHome : kGuest] = {up, act, down};
    };
    elements({0, cut.inter}, cut.cpu_home);
    elements({cut.inter, s_.inter}, !cut.cpu_home);
    ops[kEnd].push_back(sum(unit["ops"][3]["out"]));
    put(unit, cut.cpu_home, ops);
  }

  void head(const json& unit) {
    std::vector<json> ops(4, json::array());
    ops[kBegin].push_back(unit["ops"][0]);
    json ins = json::array();
    const auto rows = [&](Range range, Part part) {
      json op = unit["ops"][1];
      op["parts"][0]["weight"] = rows_of(op["parts"][0]["weight"], range);
      op["out"] = value("logits_out", range, range.size());
      ins.push_back(op["out"]);
      ops[part].push_back(op);
    };
    rows({0, s_.cut_rows}, kHome);
    rows({s_.cut_rows, s_.vocab}, kGuest);
    ops[kEnd].push_back({{"op", "concat"}, {"in", ins}, {"out", "logits"}});
    put(unit, true, ops);
  }

  // A matrix's columns, to add to the residual at home, as a partial sum elsewhere.
  void columns(json* linear, Range range, bool home) {
    json& part = (*linear)["parts"][0];
    const std::string name = part["weight"];
    part["weight"] = part_of(name, {0, s_.hidden}, range, true);
    if (home) return;
    (*linear)["accumulate"] = false;
    (*linear)["out"] = partial((*linear)["out"]);
  }
  std::string partial(const std::string& x) {
    return value_of(x == "x" ? "partial" : "partial_out", s_.hidden, x != "x");
  }
  json sum(const std::string& x) { return {{"op", "add"}, {"in", partial(x)}, {"out", x}}; }

  std::string rows_of(const std::string& name, Range rows) {
    const json shape = whole(name)["shape"];
    const bool matrix = shape.size() == 2;
    return part_of(name, rows, {0, matrix ? shape[1].get<int64_t>() : 1}, matrix);
  }
  std::string part_of(const std::string& name, Range rows, Range cols, bool matrix) {
    const std::string part = name + "[" + rows.text() + (matrix ? ", " + cols.text() : "") + "]";
    json shape = {rows.size()};
    if (matrix) shape.push_back(cols.size());
    if (!parts_.insert(part).second) return part;
    made_.push_back({{"name", part},
                     {"shape", shape},
                     {"source", nullptr},
                     {"part",
                      {{"tensor", name},
                       {"shape", whole(name)["shape"]},
                       {"row", rows.begin},
                       {"col", cols.begin}}}});
    return part;
  }
  const json& whole(const std::string& name) const {
    return *std::ranges::find_if(plan_["tensors"],
                                 [&](const json& one) { return one["name"] == name; });
  }

  std::string value(std::string name, Range range, int64_t width) {
    const bool outputs = name.ends_with("_out");
    return value_of(name + "[" + range.text() + "]", width, outputs);
  }
  std::string value_of(const std::string& name, int64_t width, bool outputs) {
    if (values_.insert(name).second) {
      plan_["values"].push_back(
          {{"name", name}, {"width", width}, {"rows", outputs ? "outputs" : "tokens"}});
    }
    return name;
  }

  // A KV layer of these heads.
  size_t entry(const json& unit, Range heads, const json& device) {
    entries_.push_back(
        {{"layer", unit["layer"]}, {"kv_head", heads.begin}, {"kv_heads", heads.size()}});
    if (s_.window > 0) entries_.back()["window"] = s_.window;
    there_ += device == "accelerator";
    return entries_.size() - 1;
  }

  // Of wholes, those stay that are still named. Parts stand in their place, or behind them.
  void name_tensors() {
    const std::string text = plan_["units"].dump();
    json tensors = json::array();
    for (const json& tensor : plan_["tensors"]) {
      if (text.find(tensor["name"].dump()) != std::string::npos) tensors.push_back(tensor);
      for (const json& part : made_) {
        if (part["part"]["tensor"] == tensor["name"]) tensors.push_back(part);
      }
    }
    plan_["tensors"] = tensors;
  }

  void place_pages() {
    const int64_t blocks = s_.pages / s_.layers, entries = std::ssize(entries_);
    plan_["kv"]["layers"] = entries_;
    if (!plan_.contains("schedule")) return;
    plan_["schedule"]["pages"] = {{"cpu", blocks * (entries - there_)},
                                  {"accelerator", blocks * there_}};
  }

  json& plan_;
  const TinyShape& s_;
  std::set<std::string> parts_, values_;
  json made_ = json::array(), entries_ = json::array();
  int64_t there_ = 0;  // KV layers on the accelerator
};

}  // namespace

void cut_units(json* plan, const TinyShape& shape) {
  Cutter(plan, shape).run();
}

}  // namespace helm::test
