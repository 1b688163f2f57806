// How products are cut for a team: every row meets every token once.
#include "cpu/linear_rows.h"

#include <doctest/doctest.h>

#include <vector>

namespace helm::test {

TEST_CASE("pieces of a product of many tokens cover it once") {
  for (const int64_t rows : {1, 31, 32, 200, 256, 1024, 1500, 4096}) {
    for (const int members : {1, 2, 3, 16}) {
      CAPTURE(rows);
      CAPTURE(members);
      const cpu::PrefillPieces pieces(rows, members);
      int64_t covered = 0;  // in order, without a gap; the last pieces may be empty
      for (int64_t i = 0; i < pieces.count(); ++i) {
        const auto piece = pieces.at(i);
        REQUIRE(piece.row == covered);
        REQUIRE(piece.end_row >= piece.row);
        covered = piece.end_row;
      }
      REQUIRE(covered == rows);
    }
  }
}

TEST_CASE("rows too few for panels give every member several pieces") {
  for (const int members : {2, 4, 16}) {
    const cpu::PrefillPieces pieces(members * 128, members);
    CHECK(pieces.count() == members * 4);
  }
}

TEST_CASE("a member's last piece of a product of many tokens is a small one") {
  for (const int members : {1, 2, 3}) {
    const cpu::PrefillPieces pieces(4096, members);
    for (int member = 0; member < members; ++member) {
      const auto part = Team::part_of(member, members, pieces.count());
      const auto first = pieces.at(part.begin), last = pieces.at(part.end - 1);
      CHECK(first.end_row - first.row == 256);
      CHECK(last.end_row - last.row == 64);
    }
  }
}

}  // namespace helm::test
