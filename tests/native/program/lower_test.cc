// Plans as programs: their texts, by hand.
#include "program/lower.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "program/placed.h"
#include "support/this_build.h"

using helm::test::placed;
using helm::test::texts;
using helm::test::TinyShape;

TEST_CASE("a plan at rest: stages, and what crosses between them") {
  CHECK(texts(placed("cccc", 2)) == std::vector<std::string>{R"(program rest
0 cpu run embedding..head)"});
  CHECK(texts(placed("cccaac", 4)) == std::vector<std::string>{R"(program rest
0 cpu run embedding..layer.1.mlp
1 up copy x cpu>accelerator after 0
2 accelerator run layer.2.attention..layer.3.mlp after 1
3 down copy x_out accelerator>cpu after 2
4 cpu run head after 3)"});
  CHECK(texts(placed("cccaaa", 4)) == std::vector<std::string>{R"(program rest
0 cpu run embedding..layer.1.mlp
1 up copy x cpu>accelerator after 0
2 accelerator run layer.2.attention..head after 1
3 down copy logits accelerator>cpu after 2)"});
  CHECK(texts(placed("acaa", 2)) == std::vector<std::string>{R"(program rest
0 accelerator run embedding
1 down copy x accelerator>cpu after 0
2 cpu run layer.0.attention..layer.0.mlp after 1
3 up copy x cpu>accelerator after 2
4 accelerator run layer.1.attention..head after 3
5 down copy logits accelerator>cpu after 4)"});
}

TEST_CASE("the units of a layer may lie on two devices") {
  CHECK(texts(placed("cacacc", 2)) == std::vector<std::string>{R"(program rest
0 cpu run embedding
1 up copy x cpu>accelerator after 0
2 accelerator run layer.0.attention after 1
3 down copy x accelerator>cpu after 2
4 cpu run layer.0.mlp after 3
5 up copy x cpu>accelerator after 4
6 accelerator run layer.1.attention after 5
7 down copy x_out accelerator>cpu after 6
8 cpu run layer.1.mlp..head after 7)"});
}

TEST_CASE("attention to far pages: they visit, or the CPU attends to them") {
  TinyShape shape = placed("ccaa", 2);
  shape.accelerator_pages = 8;
  shape.overflow = "cpu";
  const std::vector<std::string> all = texts(shape);
  REQUIRE(all.size() == 4);
  CHECK(all[1] == R"(program rest, far pages visit
0 cpu run embedding..layer.0.mlp
1 up copy x cpu>accelerator after 0
2 accelerator run layer.1 before after 1
3 up page layer.1 far, each aside
4 accelerator run layer.1 far, each after 3
5 accelerator run layer.1 near
6 accelerator run layer.1 after
7 accelerator run head
8 down copy logits accelerator>cpu after 7)");
  CHECK(all[2] == R"(program rest, far pages on cpu
0 cpu run embedding..layer.0.mlp
1 up copy x cpu>accelerator after 0
2 accelerator run layer.1 before after 1
3 down copy qkv accelerator>cpu aside after 2
4 accelerator run layer.1 near
5 cpu run layer.1 far after 3
6 up copy attention over far pages cpu>accelerator after 5
7 accelerator run layer.1 after after 6
8 accelerator run head
9 down copy logits accelerator>cpu after 8)");
  CHECK(all[3] == R"(program rest, far pages visit and on cpu
0 cpu run embedding..layer.0.mlp
1 up copy x cpu>accelerator after 0
2 accelerator run layer.1 before after 1
3 down copy qkv accelerator>cpu aside after 2
4 up page layer.1 far, each aside
5 accelerator run layer.1 far, each after 4
6 accelerator run layer.1 near
7 cpu run layer.1 far after 3
8 up copy attention over far pages cpu>accelerator after 7
9 accelerator run layer.1 after after 8
10 accelerator run head
11 down copy logits accelerator>cpu after 10)");
}

TEST_CASE("where a layer with far pages lies on two devices, each has its part") {
  TinyShape shape = placed("cacccaac", 3);
  shape.accelerator_pages = 8;
  CHECK(texts(shape).at(1) == R"(program rest, far pages visit
0 cpu run embedding
1 up copy x cpu>accelerator after 0
2 accelerator run layer.0 before after 1
3 up page layer.0 far, each aside
4 accelerator run layer.0 far, each after 3
5 accelerator run layer.0 near
6 accelerator run layer.0 after
7 down copy x accelerator>cpu after 6
8 cpu run layer.0.mlp..layer.1.mlp after 7
9 up copy x cpu>accelerator after 8
10 accelerator run layer.2 before after 9
11 up page layer.2 far, each aside
12 accelerator run layer.2 far, each after 11
13 accelerator run layer.2 near
14 accelerator run layer.2 after
15 down copy x_out accelerator>cpu after 14
16 cpu run head after 15)");
}

TEST_CASE("the CPU is at home in a cut layer: it posts, computes its own, adds the guest's") {
  TinyShape shape = placed("cccc", 2);
  shape.head_dim = 16;
  shape.cuts = {{1, 32}, {1, 32}};
  shape.cut_rows = 30;
  shape.visit_tokens = 8;
  shape.visit_pages = 20;
  const std::vector<std::string> all = texts(shape);
  REQUIRE(all.size() == 2);
  CHECK(all[0] == R"(program rest
0 cpu run embedding..layer.0.attention.begin
1 up copy h cpu>accelerator after 0
2 accelerator run layer.0.attention.guest after 1
3 down copy partial accelerator>cpu after 2
4 cpu run layer.0.attention.home
5 cpu run layer.0.attention.end..layer.0.mlp.begin after 3
6 up copy h cpu>accelerator after 5
7 accelerator run layer.0.mlp.guest after 6
8 down copy partial accelerator>cpu after 7
9 cpu run layer.0.mlp.home
10 cpu run layer.0.mlp.end..layer.1.attention.begin after 8
11 up copy h cpu>accelerator after 10
12 accelerator run layer.1.attention.guest after 11
13 down copy partial_out accelerator>cpu after 12
14 cpu run layer.1.attention.home
15 cpu run layer.1.attention.end..layer.1.mlp.begin after 13
16 up copy h_out cpu>accelerator after 15
17 accelerator run layer.1.mlp.guest after 16
18 down copy partial_out accelerator>cpu after 17
19 cpu run layer.1.mlp.home
20 cpu run layer.1.mlp.end..head.begin after 18
21 up copy h_out cpu>accelerator after 20
22 accelerator run head.guest after 21
23 down copy logits_out[30:61] accelerator>cpu after 22
24 cpu run head.home
25 cpu run head.end after 23)");
  CHECK(all[1] == R"(program visit
0 cpu run embedding
1 up copy x cpu>accelerator after 0
2 up visit layer.0 aside
3 up page layer.0 cached
4 accelerator run layer.0.attention.begin..layer.0.mlp.end after 1 2 3
5 up visit layer.1 aside
6 down page layer.0 written after 4
7 up page layer.1 cached
8 accelerator run layer.1.attention.begin..layer.1.mlp.end after 5 7
9 down page layer.1 written after 8
10 down copy x_out accelerator>cpu after 8
11 cpu run head.begin after 10
12 up copy h_out cpu>accelerator after 11
13 accelerator run head.guest after 12
14 down copy logits_out[30:61] accelerator>cpu after 13
15 cpu run head.home
16 cpu run head.end after 14)");
}

TEST_CASE("a GPU is at home in a cut layer, and has the next whole") {
  TinyShape shape = placed("ccac", 2);
  shape.head_dim = 16;
  shape.cuts = {{1, 32, false}};
  shape.visit_tokens = 8;
  shape.visit_pages = 20;
  const std::vector<std::string> all = texts(shape);
  REQUIRE(all.size() == 2);
  CHECK(all[0] == R"(program rest
0 cpu run embedding
1 up copy x cpu>accelerator after 0
2 accelerator run layer.0.attention.begin after 1
3 down copy h accelerator>cpu after 2
4 accelerator run layer.0.attention.home
5 cpu run layer.0.attention.guest after 3
6 up copy partial cpu>accelerator after 5
7 accelerator run layer.0.attention.end..layer.0.mlp.begin after 6
8 down copy h accelerator>cpu after 7
9 accelerator run layer.0.mlp.home
10 cpu run layer.0.mlp.guest after 8
11 up copy partial cpu>accelerator after 10
12 accelerator run layer.0.mlp.end..layer.1.mlp after 11
13 down copy x_out accelerator>cpu after 12
14 cpu run head after 13)");
  CHECK(all[1] == R"(program visit
0 cpu run embedding
1 up copy x cpu>accelerator after 0
2 up visit layer.0 aside
3 up page layer.0 cached
4 accelerator run layer.0.attention.begin..layer.0.mlp.end after 1 2 3
5 down page layer.0 written after 4
6 accelerator run layer.1.attention..layer.1.mlp
7 down copy x_out accelerator>cpu after 6
8 cpu run head after 7)");
}

TEST_CASE("only a cut program keeps values on a device from stage to stage") {
  TinyShape shape = placed("ccac", 2);
  const auto whole = [](const TinyShape& placed) {
    std::vector<bool> found;
    const helm::Plan plan = helm::Plan::from_json(helm::test::tiny_model(placed).plan);
    for (const helm::Program& program : helm::lower(plan)) found.push_back(program.whole);
    return found;
  };
  shape.head_dim = 16;
  shape.visit_tokens = 8;
  shape.visit_pages = 20;
  CHECK(whole(shape) == std::vector<bool>{false, false});
  for (const bool cpu_home : {false, true}) {
    shape.cuts = {{1, 0, cpu_home}};
    CHECK(whole(shape) == std::vector<bool>{true, false});
  }
  shape.cut_rows = 30;
  CHECK(whole(shape) == std::vector<bool>{true, true});
  shape.visit_tokens = 0;
  shape.cut_on_cpu = true;  // in a row there, as one stage
  shape.devices.assign(4, "cpu");
  CHECK(texts(shape) == std::vector<std::string>{"program rest\n0 cpu run embedding..head.end"});
}

TEST_CASE("a plan has the kinds of steps that it can need") {
  const auto kinds = [](const TinyShape& shape) {
    std::vector<std::string> first_lines;
    for (const std::string& text : texts(shape)) {
      first_lines.push_back(text.substr(8, text.find('\n') - 8));
    }
    return first_lines;
  };
  using Kinds = std::vector<std::string>;
  TinyShape shape = placed("ccaa", 2);
  CHECK(kinds(shape) == Kinds{"rest"});
  shape.visit_tokens = 5;
  shape.visit_pages = 20;
  CHECK(kinds(shape) == Kinds{"rest", "visit"});
  shape.accelerator_pages = 19;
  CHECK(kinds(shape) == Kinds{"rest", "visit", "rest, far pages visit", "visit, far pages visit"});
  shape.overflow = "cpu";
  CHECK(kinds(shape) == Kinds{"rest", "visit", "rest, far pages visit", "visit, far pages visit",
                              "rest, far pages on cpu", "visit, far pages on cpu",
                              "rest, far pages visit and on cpu",
                              "visit, far pages visit and on cpu"});
  shape.visit_tokens = 0;
  CHECK(kinds(shape) == Kinds{"rest", "rest, far pages visit", "rest, far pages on cpu",
                              "rest, far pages visit and on cpu"});
  shape.accelerator_pages = 20;
  CHECK(kinds(shape) == Kinds{"rest"});
}

TEST_CASE("tasks wait for earlier ones of other lanes, and each lane and layer is there once") {
  // Every placement of the units of three layers.
  for (int bits = 0; bits < 1 << 8; bits += helm::test::kFew ? 5 : 1) {
    std::string places;
    for (int i = 0; i < 8; ++i) places += (bits >> i & 1) != 0 ? 'a' : 'c';
    CAPTURE(places);
    for (const char* overflow : {"stream", "cpu"}) {
      TinyShape shape = placed(places, 3);
      shape.accelerator_pages -= shape.accelerator_pages / 2;
      shape.overflow = overflow;
      const helm::Plan plan =
          helm::with_partials(helm::Plan::from_json(helm::test::tiny_model(shape).plan));
      for (const helm::Program& program : helm::lower(plan)) {
        std::vector<int> runs(plan.units.size(), 0);
        for (size_t i = 0; i < program.tasks.size(); ++i) {
          const helm::Task& task = program.tasks[i];
          for (size_t j = 0; j < task.after.size(); ++j) {
            const auto other = static_cast<size_t>(task.after[j]);
            CHECK(other < i);
            if (j > 0) CHECK(task.after[j] > task.after[j - 1]);
            const helm::Task& before = program.tasks[other];
            CHECK((before.lane != task.lane || before.device != task.device));
          }
          const bool counts =
              task.verb == helm::Task::Verb::kRun || task.verb == helm::Task::Verb::kAfter;
          for (size_t u = task.begin; counts && u < task.end; ++u) {
            ++runs[u];
            CHECK(plan.units[u].device == task.device);
          }
        }
        CHECK(runs == std::vector<int>(plan.units.size(), 1));
      }
    }
  }
}
