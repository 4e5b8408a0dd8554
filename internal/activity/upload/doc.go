// Package upload takes files in and keeps their bytes: which types there are ([Sniff], from the bytes alone), which are
// allowed and how large they may be ([Intake.Receive]), what a file's name becomes ([CleanName]), where the bytes lie
// ([Storage]; [Dir] is a local folder), and what happens to files that nobody knows ([Sweeper]).
//
// It imports nothing of ours. It knows neither tables nor HTTP: package activity writes the row of a file in the
// transaction of its activity, internal/http reads the form and serves the bytes.
//
// A file is whole and on the disk before its row is committed, so a row always has its file. The other way round a file
// can be left without a row, by a crash between the two or a commit whose outcome nobody knows; it is removed by the
// sweeper once it is an hour old.
//
// Goroutines: [Sweeper.Run] is a loop that the caller owns; nothing else starts one.
//
// On failure: Receive leaves nothing, whoever was at fault: the sender (its reader's error, as it is), the file
// ([ErrTooLarge], [ErrEmpty], [*TypeError]) or the storage ([ErrStorage]). An error of the sweeper is logged and met
// again in the next round.
//
// Tests need no database; [Dir] is tested in temporary folders, the sniffer by a table of real files' beginnings and by
// fuzzing.
package upload
