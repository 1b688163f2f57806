#include "serve/llguidance.h"

#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <mutex>

#include "base/check.h"

namespace helm::llguidance {
namespace {

// What set_defaults() gives in every version with these layouts.
constexpr Limits kDefaults = {2000, 1'000'000, 200'000, 50'000, 250'000, 500'000, true, true};

template <typename Function>
void find(void* library, const std::string& path, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) {
    fail(ErrorKind::kAbsent, "[grammar] ", path, " has no ", name,
         "; install llguidance 1.7 to 1.9");
  }
}

Library load(const std::string& path) {
  void* const file = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (file == nullptr) {
    fail(ErrorKind::kAbsent, "[grammar] llguidance cannot be loaded: ", dlerror());
  }
  Library library{};
  find(file, path, "llg_get_version", library.version);
  find(file, path, "llg_constraint_init_set_defaults", library.set_defaults);
  find(file, path, "llg_new_tokenizer_v2", library.new_tokenizer);
  find(file, path, "llg_free_tokenizer", library.free_tokenizer);
  find(file, path, "llg_new_matcher", library.new_matcher);
  find(file, path, "llg_clone_matcher", library.clone_matcher);
  find(file, path, "llg_free_matcher", library.free_matcher);
  find(file, path, "llg_matcher_get_error", library.error);
  find(file, path, "llg_matcher_compute_mask_into", library.mask);
  find(file, path, "llg_matcher_get_mask_byte_size", library.mask_bytes);
  find(file, path, "llg_matcher_consume_token", library.consume);
  find(file, path, "llg_matcher_compute_ff_tokens", library.forced);
  find(file, path, "llg_matcher_is_stopped", library.is_stopped);
  return library;
}

// Whether "llguidance@MAJOR.MINOR..." is a version whose layouts are those above.
bool known(const std::string& version) {
  const size_t at = version.find("llguidance@");
  int major = 0, minor = 0;
  if (at == std::string::npos ||
      std::sscanf(version.c_str() + at, "llguidance@%d.%d", &major, &minor) != 2) {
    return false;
  }
  return major == 1 && minor >= 7 && minor <= 9;
}

void check_layout(const Library& library, const std::string& path) {
  const std::string version = library.version();
  MatcherOptions options{};
  if (known(version)) library.set_defaults(&options, nullptr);
  const Limits& found = options.limits;
  const bool equal = found.max_items_in_row == kDefaults.max_items_in_row &&
                     found.initial_lexer_fuel == kDefaults.initial_lexer_fuel &&
                     found.step_lexer_fuel == kDefaults.step_lexer_fuel &&
                     found.step_max_items == kDefaults.step_max_items &&
                     found.max_lexer_states == kDefaults.max_lexer_states &&
                     found.max_grammar_size == kDefaults.max_grammar_size;
  if (!equal) {
    fail(ErrorKind::kAbsent, "[grammar] ", path, " is ", version,
         ", whose interface is not known; install llguidance 1.7 to 1.9");
  }
}

}  // namespace

const Library& open_llguidance(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, Library> loaded;
  const std::lock_guard lock(mutex);
  const auto found = loaded.find(path);
  if (found != loaded.end()) return found->second;
  const Library library = load(path);
  check_layout(library, path);
  return loaded.emplace(path, library).first->second;
}

}  // namespace helm::llguidance
