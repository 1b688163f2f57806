// Uses HELM wrongly in every way that is listed here: misuse PLANS MODEL. PLANS is a folder of
// good.json, a plan for the weights in MODEL, and of files that are none. Prints, line by line,
// what came of each: its name, the kind of error and the message, separated by tabs.
#include <helm/helm.h>

#include <cmath>
#include <functional>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

namespace {

using Strings = std::vector<std::string>;
using Uses = std::vector<std::pair<std::string, std::function<void()>>>;

const char* name_of(helm::ErrorKind kind) {
  switch (kind) {
    case helm::ErrorKind::kInvalid:
      return "invalid";
    case helm::ErrorKind::kMemory:
      return "memory";
    case helm::ErrorKind::kCapacity:
      return "capacity";
    case helm::ErrorKind::kIo:
      return "io";
    case helm::ErrorKind::kDevice:
      return "device";
    case helm::ErrorKind::kCompression:
      return "compression";
    case helm::ErrorKind::kAbsent:
      return "absent";
  }
  return "?";
}

void report(const std::string& name, const std::function<void()>& use) {
  std::cout << name << '\t';
  try {
    use();
    std::cout << "accepted\t";
  } catch (const helm::Error& error) {
    std::cout << name_of(error.kind()) << '\t' << error.what();
  } catch (const std::exception& error) {
    std::cout << "foreign\t" << error.what();
  }
  std::cout << std::endl;  // also where the next one ends the process
}

class Program {
 public:
  Program(std::string plans, std::string model)
      : plans_(std::move(plans)), model_(std::move(model)), engine_(plan("good"), in(model_)) {}

  void run() {
    for (const Uses& uses : {plans(), engines(), sequences(), generations(), machines()}) {
      for (const auto& [name, use] : uses) report(name, use);
    }
  }

 private:
  static helm::EngineOptions in(const std::string& directory) {
    helm::EngineOptions options;
    options.directory = directory;
    return options;
  }
  helm::Plan plan(const std::string& name) const {
    return helm::Plan::from_file(plans_ + "/" + name + ".json");
  }

  Uses plans() {
    Uses uses;
    for (const char* name :
         {"report.json", "profile.json", "config.json", "tokenizer.json", "index.json",
          "weights.safetensors", "model.gguf", "empty.json", "folder", "absent.json", "cut.json",
          "old.json", "other.json", "list.json", "wrong_field.json"}) {
      uses.emplace_back(name, [=, this] { helm::Plan::from_file(plans_ + "/" + name); });
    }
    uses.emplace_back("no name", [] { helm::Plan::from_file(""); });
    uses.emplace_back("path as text", [] { helm::Plan::from_json("models/plan.json"); });
    uses.emplace_back("no text", [] { helm::Plan::from_json(""); });
    return uses;
  }

  Uses engines() {
    const auto load = [this](const std::function<void(helm::Plan&, helm::EngineOptions&)>& spoil) {
      return [=, this] {
        helm::Plan plan = this->plan("good");
        helm::EngineOptions options = in(model_);
        spoil(plan, options);
        helm::Engine(plan, options);
      };
    };
    using helm::EngineOptions, helm::Plan;
    static const float kData[4] = {};
    const auto bind = [](const Plan& plan, EngineOptions& options, helm::TensorView view) {
      if (view.shape.empty()) view.shape = plan.tensors[0].shape;
      options.tensors[plan.tensors[0].name] = std::move(view);
    };
    return {
        {"empty plan", load([](Plan& plan, EngineOptions&) { plan = {}; })},
        {"no folder named", load([](Plan&, EngineOptions& o) { o.directory.clear(); })},
        {"no such folder", load([](Plan&, EngineOptions& o) { o.directory = "/absent"; })},
        {"folder without weights", load([this](Plan&, EngineOptions& o) { o.directory = plans_; })},
        {"cut weights", load([this](Plan&, EngineOptions& o) { o.directory = plans_ + "/cut"; })},
        {"threads below zero", load([](Plan&, EngineOptions& o) { o.threads = -1; })},
        {"pace below zero", load([](Plan&, EngineOptions& o) { o.pace.cpu_bytes_per_s = -1; })},
        {"a million threads", load([](Plan&, EngineOptions& o) { o.threads = 1000000; })},
        {"CPUs for other threads",
         load([](Plan&, EngineOptions& o) { o.threads = 1, o.cpus = {0, 1}; })},
        {"unknown device",
         [this] {
           EngineOptions options = in(model_);
           options.device = "gpu";
           helm::Engine(plan("sim"), options);
         }},
        {"tensor of another shape",
         load([=](Plan& p, EngineOptions& o) { bind(p, o, {kData, helm::DType::kF32, {4}, {}}); })},
        {"tensor without data", load([=](Plan& p, EngineOptions& o) {
           bind(p, o, {nullptr, helm::DType::kF32, {}, {}});
         })},
        {"tensor in i8",
         load([=](Plan& p, EngineOptions& o) { bind(p, o, {kData, helm::DType::kI8, {}, {}}); })},
        {"tensor that nobody gives",
         load([](Plan& plan, EngineOptions&) { plan.tensors[0].source.reset(); })},
    };
  }

  Uses sequences() {
    struct Opened {
      explicit Opened(helm::Engine& given) : engine(given), id(given.open(8)) {}
      ~Opened() { engine.close(id); }
      void step(const std::vector<int32_t>& tokens) const {
        engine.step(std::vector<helm::StepInput>{{id, tokens}});
      }
      helm::Engine& engine;
      helm::SequenceId id;
    };
    const auto opened = [this](const std::function<void(const Opened&)>& use) {
      return [=, this] { use(Opened(engine_)); };
    };
    const auto step = [=](const std::vector<int32_t>& tokens) {
      return opened([=](const Opened& sequence) { sequence.step(tokens); });
    };
    return {
        {"open nothing", [this] { engine_.open(0); }},
        {"open too much", [this] { engine_.open(1 << 30); }},
        {"close what is not open", [this] { engine_.close(77); }},
        {"fork beyond the source", opened([](const Opened& o) { o.engine.fork(o.id, 5, 8); })},
        {"step of nothing", [this] { engine_.step({}); }},
        {"step without tokens", step({})},
        {"step with an unknown token", step({1 << 30})},
        {"step beyond the capacity", step(std::vector<int32_t>(9, 1))},
        {"collect what was not submitted", [this] { engine_.collect(); }},
        {"save to no folder", opened([](const Opened& sequence) {
           const std::vector<int32_t> tokens = {1};
           sequence.step(tokens);
           sequence.engine.save(sequence.id, tokens, "/absent/kv");
         })},
        {"load what was not saved", [this] { engine_.load(plans_ + "/good.json", 8); }},
    };
  }

  Uses generations() {
    using helm::Request;
    Request good;
    good.prompt = {1, 2, 3};
    const auto generate = [=, this](const std::function<void(Request&)>& spoil) {
      return [=, this] {
        Request request = good;
        spoil(request);
        helm::Generation(engine_, {request});
      };
    };
    return {
        {"no prompt", generate([](Request& r) { r.prompt.clear(); })},
        {"prompt token below zero", generate([](Request& r) { r.prompt[1] = -1; })},
        {"prompt beyond the context", generate([](Request& r) { r.prompt.resize(1 << 20, 1); })},
        {"no new tokens", generate([](Request& r) { r.max_tokens = 0; })},
        {"temperature that is no number",
         generate([](Request& r) { r.sampling.temperature = std::nanf(""); })},
        {"top_p over one", generate([](Request& r) { r.sampling.top_p = 2; })},
        {"cached of no sequence", generate([](Request& r) { r.cached = 2; })},
        {"unknown sequence", generate([](Request& r) { r.sequence = 99; })},
        {"request that was not given", [=, this] { helm::Generation(engine_, {good}).timings(1); }},
        {"another engine's prefixes",
         [=, this] {
           helm::Engine other(plan("good"), in(model_));
           helm::PrefixCache prefixes(other);
           helm::Generation(engine_, {good}, &prefixes);
         }},
        {"save what is not kept",
         [this] { helm::PrefixCache(engine_).save(std::vector<int32_t>{1}, plans_ + "/kv"); }},
    };
  }

  static Uses machines() {
    return {
        {"unknown accelerator", [] { helm::accelerator_info("cuda:first"); }},
        {"reads by no thread", [] { helm::stream_read_bytes_per_s(0, 1 << 20, 0.01); }},
        {"probe of no tokens",
         [] { helm::StageProbe(0, {}).matmul(1, helm::format_of(helm::DType::kF32), 0, 0.01); }},
        {"unknown dtype", [] { helm::dtype_from_name("int4"); }},
    };
  }

  std::string plans_, model_;
  helm::Engine engine_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  Program(argv[1], argv[2]).run();
}
